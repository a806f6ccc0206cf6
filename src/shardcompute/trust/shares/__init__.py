"""Additive secret shares: linear maps computed by two machines of which neither learns what it computes with.

Numbers are integers modulo 2^64. `fixed_point` makes integers of weights and activations and says how far the result is
off, `ring` splits, multiplies and joins, `freivalds` checks what a machine says that it has computed.
"""
