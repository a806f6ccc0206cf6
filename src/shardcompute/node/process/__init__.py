"""Processes of a node: launching a cluster on one machine, supervising its workers, pid files, log files.

Owns what the operating system sees: child processes and their ends, `cluster.json` and its kin, rotation of logs. May
call every other room of `node`; only the command line, and benchmarks for the logs, call it.
"""
