"""Conditions of work: when a machine's owner lets its worker work, and how a worker keeps to that.

`machine` reads what the system says of power, people and links; `policy` decides, without a clock of its own; `watch`
looks at it in a thread. May call `core` alone.
"""
