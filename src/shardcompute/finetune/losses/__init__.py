"""What a run makes smaller: the cross-entropy of answers, of preferences (DPO), or the distance to a teacher (KL)."""
