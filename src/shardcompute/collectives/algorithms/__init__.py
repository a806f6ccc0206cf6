"""Algorithms of collectives: who sends what to whom in which round, and the one order in which sums are made."""
