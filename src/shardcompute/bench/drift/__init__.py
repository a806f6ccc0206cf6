"""`bench drift`: a stage or a line becomes slow amid answers; how soon the chain has gone around it, and whether noise
alone moves anything."""
