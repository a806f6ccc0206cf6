"""Coordinator: the control plane's shell. Events in, actions out; the truth is `control.ClusterState`.

Owns the journal, the registry of nodes with open control links, and what is in flight: commands that wait for
replies, chains that are being connected. Decides nothing itself: one thread applies events and executes the actions
that `control.next_actions` names. May call `rpc` and `control`; knows drivers by a port and workers by commands.
"""
