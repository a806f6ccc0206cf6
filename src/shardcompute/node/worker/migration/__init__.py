"""KV that moves: sessions of a stage are sent to the one that takes its layers over, while they go on."""
