"""Block types of GGUF files, decoded into the blocks that our kernels take.

Owns how ggml packs weights into blocks: a decoder for each type, in numpy, exact. Knows nothing of files or models.
"""
