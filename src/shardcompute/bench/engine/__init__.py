"""Benchmark of engines in one process: every weight form and backend, next to others in the same run."""
