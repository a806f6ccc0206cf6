"""Commands of models on disk: `pull`, `list`, `show`, `rm`, `distill` for students, and `draft-head` for drafters.

Owns how a model is described to people and opened with progress. May call `weights`, `draft_training` and
`node.local`, and `cli.cluster` for the completion of names.
"""
