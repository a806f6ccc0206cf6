"""Teaching through a swarm: a draft head for a model that a cluster serves and no machine holds whole.

The model talks to itself in ordinary sessions of the cluster (`play`), the states of what was said come from its last
stage, and both are kept on this machine's disk until they were learned from (`recording`). Of the model itself only its
ends are read (`taught_model`). The rest is `draft_training`'s own (`teach`), which never calls back here.
"""
