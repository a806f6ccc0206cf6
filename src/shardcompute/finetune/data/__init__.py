"""Training data: files read and checked, examples with what is learned of them, and the batches of each step."""
