"""ShardCompute: serve one language model from many small machines."""
