"""Worker: one machine's shards, and the data plane between stages.

Owns the loaded stages with their KV, the links to the next stage and to drivers, and the activation log from which a
lost neighbour is told what it missed: *receive, choose batch, step, send*. May call `rpc`, `weights` and `runtime`;
does as the coordinator commands, and imports neither it nor drivers.
"""
