"""Ledger of a cluster, kept by its coordinator: a file that only grows, what is written into it, and who may look."""
