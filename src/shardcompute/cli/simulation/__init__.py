"""Clusters that nobody has: the simulator on the command line."""
