"""Commands of zero-knowledge proofs: `zk`."""
