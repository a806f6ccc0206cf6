"""`python -m shardcompute.draft_training MODEL FILE` trains a draft head in a batch job, without what a terminal needs.

Plain lines go to standard output; the file is written once a minute, and at the end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shardcompute.core.errors import ShardComputeError
from shardcompute.core.settings import load_settings
from shardcompute.draft_training.train import TrainingOptions, train_draft_head
from shardcompute.models.draft_head import DraftHeadWeights, encode_draft_head
from shardcompute.weights.checkpoint import open_checkpoint
from shardcompute.weights.sources.reference import parse_reference
from shardcompute.weights.sources.resolve import resolve


def main(arguments: Sequence[str] | None = None) -> int:
    defaults = TrainingOptions()
    parser = argparse.ArgumentParser(prog="python -m shardcompute.draft_training", description=__doc__)
    parser.add_argument("model", help="a folder, a .gguf file or any other name of a model")
    parser.add_argument("file", type=Path, help="where to write what was trained")
    parser.add_argument("--text", type=Path, help="a file of text to learn from as well")
    parser.add_argument("--minutes", type=float, default=defaults.minutes)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--device", default=defaults.device)
    for name in ("epochs", "soft", "rate"):
        parser.add_argument(f"--{name}", type=float, default=getattr(defaults, name))
    for name in ("layers", "width", "vocabulary", "sessions", "rows", "context-length", "threads", "seed"):
        default = getattr(defaults, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args(arguments))
    model, file, text = given.pop("model"), given.pop("file"), given.pop("text")

    def save(weights: DraftHeadWeights) -> None:
        file.write_bytes(encode_draft_head(weights))

    try:
        with open_checkpoint(resolve(parse_reference(model), load_settings())) as checkpoint:
            content = "" if text is None else text.read_text(errors="replace")
            options = TrainingOptions(**given)
            trained = train_draft_head(checkpoint, options, text=content, say=_print_line, save=save)
    except ShardComputeError as error:
        print(f"{error}\n{error.hint}".rstrip(), file=sys.stderr)
        return 1
    save(trained.weights)
    _print_line(f"{file}: {file.stat().st_size} bytes")
    return 0


def _print_line(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
