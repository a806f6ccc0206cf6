"""Commands that start and stop nodes: `up`, `coordinator`, `worker`, `join`, `driver`, `down`.

Owns a process's life in the foreground: its addresses and ports, what it says while it runs, and signals. May call
`cli.models`, `cli.options`, `node` and `api`; what a node does is decided there.
"""
