"""Where bytes come from and how they become matrices: sources, cache, file formats, quantisation, shards."""
