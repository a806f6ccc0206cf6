"""A program that holds a conversation on its terminal: `python -m support.api.talking_program FOLDER`.

Its model repeats what it was told and ends; told to talk on, it does so until it is stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardcompute.cli.chat.answer import AnswerOptions
from shardcompute.cli.chat.conversation import Conversation
from shardcompute.cli.chat.terminal import read_terminal_line
from shardcompute.cli.console import open_screen
from shardcompute.core.generation import Delta, GenerationRequest, Sampling, Timings

ENDLESS = "talk on"


class Echo:
    name = "echo"
    has_chat_template = True
    eos_ids: frozenset[int] = frozenset()

    @property
    def tokenizer(self) -> Echo:
        return self

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return list(map(ord, messages[-1]["content"]))

    def stream(self, request: GenerationRequest) -> Iterator[Delta]:
        text = "".join(map(chr, request.prompt))
        yield Delta(f"<{text}>".replace("\n", "/"))
        while text == ENDLESS:
            time.sleep(0.01)
            yield Delta(".")
        yield Delta(finish="stop", timings=Timings())


def main() -> None:
    service: Any = Echo()
    options = AnswerOptions(16, Sampling(), None, (), None, is_raw=False)
    Conversation(service, options, open_screen(), Path(sys.argv[1]), is_verbose=False).hold(
        read_terminal_line
    )
    print("left in order")


if __name__ == "__main__":
    main()
