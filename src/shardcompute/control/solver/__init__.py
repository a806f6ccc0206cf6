"""Solver: which machines, in which order, with how many layers each, as arithmetic on arrays.

Owns the search space, lower bounds, exact methods for few machines, greedy construction with local search for many,
and annealing. Knows machines by their index and nothing of names, requests or the state; pure and seeded.
"""
