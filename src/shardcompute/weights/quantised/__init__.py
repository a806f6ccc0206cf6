"""Quantised checkpoints: safetensors whose `quantization_config` says how a matrix lies in several tensors.

Owns the published forms (GPTQ, AWQ, FP8, compressed-tensors, bitsandbytes, MXFP4, …), each a small module that names
the tensors of a matrix and makes rows of them into a matrix form of kernels; `schemes` lists them. `folded_file`
shows a file as if each matrix were one tensor. May call `formats`, `backends.matrix` and `core`; knows nothing of
models.
"""
