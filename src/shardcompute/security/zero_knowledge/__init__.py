"""Zero-knowledge proofs of small heads: that a linear map was computed from a state that was committed to."""
