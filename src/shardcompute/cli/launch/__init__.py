"""Launchers: workers on machines that one already manages, over ssh, in a Slurm allocation or on a Ray cluster.

Each makes a join token for as many machines as it starts, hands it over where no list of processes shows it, and can
end what it started. May call the cluster's commands, options and the console.
"""
