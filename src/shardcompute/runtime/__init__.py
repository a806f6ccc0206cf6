"""One shard at work: a stage with its sessions, and the tail that picks tokens."""
