"""Memory of a worker: what its process takes, what it may offer, and how an offer recovers after memory ran out."""
