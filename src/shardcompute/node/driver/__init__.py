"""Driver: the head of a chain. Sessions, scheduling, speculative decoding, and answers as they come.

Owns the KV life of every generation that it was asked for, the frames in flight, and the pool of drivers that serves
a process' API, on this machine or hosted by a worker. Holds no layers. May call `rpc`, `telemetry`, `weights` (for
tokenizers) and `decoding`; is told about chains by whoever implements the coordinator's side, and imports neither it
nor workers.
"""
