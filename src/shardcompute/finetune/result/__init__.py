"""What comes of a run besides its adapter: a model with the adapter merged into it, and its card."""
