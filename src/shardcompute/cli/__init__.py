"""Command line: the program `shardcompute`, its commands, and what it prints.

Owns options, exit codes, tables and progress, and how a command finds the cluster or model it works on. One file per
command or group of commands, in rooms that call downwards only: `serve`, `chat` and `tools` above `models`, `cluster`,
`options` and the console. May call everything below; nothing imports it. Whatever computes is imported inside a
command, so that help and completion answer at once.
"""
