"""Placement measured: every method on the same seeded clusters, against a lower bound and in CPU time."""
