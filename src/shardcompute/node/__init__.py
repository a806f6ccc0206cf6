"""Asyncio and thread shells around the pure rooms, one folder a role: what runs on machines.

Owns sockets, threads and files of a running node; decides nothing that `control` can decide, computes nothing that
`runtime` can. `driver`, `worker` and `coordinator` do not import each other: they meet over `rpc`, or are put together
by `cluster` (the first machine), `local` (one process) and `process` (what the commands start). `service` is what the
API sees of any of them.
"""
