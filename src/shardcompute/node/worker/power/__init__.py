"""Power of a machine: what its energy counters say, and what it draws at work and at rest."""
