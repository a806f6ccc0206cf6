"""The release that this is."""

from __future__ import annotations

from importlib import metadata

VERSION = metadata.version("shardcompute")
