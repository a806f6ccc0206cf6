"""Weights: from a model's name to the matrices of a shard.

Owns checkpoints, the loader that slices and quantises as the decoder asks, packed files, what is served to machines
without files, and the cache of a worker's shards. May call `models` for specs and layouts and `backends` for matrix
forms; bytes come from `sources`, their meaning from `formats`.
"""
