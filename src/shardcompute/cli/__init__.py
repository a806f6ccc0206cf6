"""The commands: `shardcompute run`, `up`, `join`, `worker`, `coordinator`, `driver`, `down`, `logs`, `doctor`, `pull`,
`list`, `show`, `rm` and `bench`.

One file per command or group of commands. Whatever computes is imported inside a command, so that help and
completion answer at once.
"""
