"""Receipts at a driver: what stages sign for is collected, joined to one receipt per answer, and kept for a while."""
