"""Command-line options that several commands share, each declared once.

Owns their names, bounds, defaults and help, as annotated types and as records of them (`records` expands those into a
command's signature), and what they add up to. Imports nothing that computes: help must answer at once.
"""
