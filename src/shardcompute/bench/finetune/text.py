"""Text to teach with: sentences that are alike, and not all the same."""

from __future__ import annotations

import json
from pathlib import Path

_SENTENCE = "the quick brown fox jumps over the lazy dog and runs on "


def write_text(file: Path, examples: int = 32) -> Path:
    text = _SENTENCE * 5
    file.write_text("\n".join(json.dumps({"text": f"{number} {text}"}) for number in range(examples)))
    return file
