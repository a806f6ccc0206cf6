"""Transitions: how the cluster's state follows from events, one file for each kind of thing that they concern.

Owns `apply(state, event)`, the only way in which `ClusterState` changes, and the updates that several transitions
share. Pure; may call the state, the events and the arithmetic of placement, and decides nothing: that is
`control.planning`.
"""
