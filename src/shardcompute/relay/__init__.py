"""Relay: splices bytes between two members that both dialled out to it. It has no keys of theirs, decodes nothing of
what they say, and imports no tensor library."""
