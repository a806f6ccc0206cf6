"""Models: the spec of one, its families as data, one decoder for all of them, its tokenizer and chat template.

Owns everything that changes a model's maths or its text. May call `backends` for the primitives that the decoder is
written against, and `core`; reads no files and no weights by itself.
"""
