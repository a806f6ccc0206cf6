"""Commands of attestation: `evidence`, and the files that others are given."""
