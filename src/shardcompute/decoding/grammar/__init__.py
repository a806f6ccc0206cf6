"""Grammars: from a JSON schema, an expression or a format of calls to the tokens that may come next.

Owns the masks, and how schemas are read for generating. Calls the grammar library and a model's vocabulary alone.
"""
