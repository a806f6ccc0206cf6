"""Benchmarks on emulated networks: machines far apart (`wan`), thin uplinks (`thin`), faults (`faults`).

Owns a real cluster on an emulated network, Spec-Bench's prompts, and what is made of the answers. May call `sim` for
the network and `bench`'s own shared files; clusters are asked over HTTP as any client would.
"""
