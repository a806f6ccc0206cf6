"""Fine-tuning through a cluster: whoever drives a run, from a machine that holds neither weights nor torch.

Opens stages on workers (`crew`), gives them their orders (`swarm_pipeline`) and begins again from the last checkpoint
when one of them is lost (`swarm_run`). Meets workers over links alone.
"""
