"""Stages of a worker at work: *receive, choose, step, send*.

Owns the shards that are loaded, their places in chains, the one thread that computes with all of them, and the links
out. May call `runtime`, `wire` and the worker's rooms for ranks, receipts and KV that moves; the worker loads shards
and hands them in.
"""
