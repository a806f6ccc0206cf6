"""Tensor ranks on a worker: its shares of stages, and the groups in which they are computed."""
