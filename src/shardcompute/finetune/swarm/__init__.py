"""A run whose stages are on several machines: what they say to each other, and one stage at work."""
