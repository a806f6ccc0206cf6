"""Local engine: a whole model in this process, without a cluster.

Owns a chain of stages that run one after the other in a thread, and the service that puts a driver before it. May
call `driver`, `runtime` and `weights`; knows no links, no coordinator and no other machine.
"""
