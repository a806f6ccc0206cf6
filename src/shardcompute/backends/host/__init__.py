"""What is computed on the host in plain numpy: the oracle, and the parts that backends compute one way for all.

Owns the numpy executor, rotations' tables, the choice of experts and what adapters add. May call its
siblings in `backends` and `core`.
"""
