"""What is computed on the host in plain numpy: the oracle, and the parts that backends compute one way for all.

Owns the numpy executor, rotations' tables and the choice of experts. May call its siblings in `backends` and `core`.
"""
