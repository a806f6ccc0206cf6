"""Fabrics: what carries frames of collectives from rank to rank, and what those frames look like."""
