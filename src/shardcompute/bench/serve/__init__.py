"""`bench serve`: a real server under HTTP clients, next to the engine that it serves with."""
