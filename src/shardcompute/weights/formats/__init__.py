"""File formats: safetensors and GGUF, read strictly, and quantisation of what is in them.

Owns headers, ranged reads, and how stored tensors become the matrix forms of kernels. Every size is checked before
anything is allocated. May call `backends.matrix` and `core`; knows nothing of models or where files come from.
"""
