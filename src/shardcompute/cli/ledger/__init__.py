"""Commands of the ledger: what it comes to, the whole of it as a file, and whether such a file fits."""
