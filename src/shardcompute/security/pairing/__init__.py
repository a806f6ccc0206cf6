"""Pairing: a short code that people carry from one screen to another lets one machine in.

`cpace` agrees on a key by a code, `codes` keeps the one code that is good at a time. May call `core` alone.
"""
