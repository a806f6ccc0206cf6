"""Images of requests: where they come from, what they may cost, and what the model is shown of them.

Owns data URLs, fetching (off unless the operator allows it) and the threads in which images are decoded. Calls
`models` for decoding and for what a family's image processor does; `api.generation` calls it.
"""
