"""Shares at a worker: linear maps in integers, and what clients' shares are multiplied with."""
