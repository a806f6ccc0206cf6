"""Core types: what every room shares, from errors to the steps of a chain.

Owns the exception tree, settings, requests with their sampling, batches and steps, effects that are done outside of
locks, units as people read them, and logging that cannot flood. Imports nothing of ours, no tensors and no asyncio;
everybody may import it.
"""
