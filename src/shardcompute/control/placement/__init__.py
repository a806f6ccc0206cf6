"""Placement: which machines take which layers of a model, and what that is worth.

Owns the arithmetic: a request with the capacities of all nodes, the cost model, cuts of layers, the order of a ring,
the search over them, and what replaces a lost stage. Pure and seeded; may call the state, sizes and policy of
`control`, and knows nothing of events or actions.
"""
