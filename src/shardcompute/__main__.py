"""`python -m shardcompute` is the command `shardcompute`."""

from __future__ import annotations

from shardcompute.cli.main import main

if __name__ == "__main__":
    main()
