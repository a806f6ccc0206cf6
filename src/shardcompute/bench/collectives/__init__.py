"""`bench collectives`: how long sums between ranks take, by size, algorithm and line, and what they send."""
