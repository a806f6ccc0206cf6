"""Options of commands that ask a model: how long an answer may get, how its tokens are drawn and drafted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shardcompute.cli.options.cluster import Drafting
from shardcompute.core.generation import Sampling, Speculation

_SAMPLING = "Sampling"

MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer.")]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="Image to ask about (PNG, JPEG, WebP or GIF), for a model that sees; may be repeated.",
    ),
]
CHAT_TEMPERATURE = 0.7
"""Of conversations, here and on the page."""
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        min=0,
        max=2,
        metavar="X",
        help="0 takes the most likely token, 1 draws as the model was trained; by default "
        f"{CHAT_TEMPERATURE} in a conversation, as on the page, and 0 for a single prompt.",
        rich_help_panel=_SAMPLING,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        min=0,
        max=1,
        metavar="X",
        help="Draw from the likeliest tokens that make up this much.",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k",
        min=0,
        metavar="N",
        help="Draw from the N likeliest tokens; 0: from all.",
        rich_help_panel=_SAMPLING,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        min=0,
        max=1,
        metavar="X",
        help="Leave out tokens less likely than this share of the likeliest.",
        rich_help_panel=_SAMPLING,
    ),
]
RepeatPenalty = Annotated[
    float,
    typer.Option(
        "--repeat-penalty",
        min=0.01,
        max=10,
        metavar="X",
        help="Above 1, repetition becomes less likely.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Makes a drawn answer repeatable.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", help="End the answer where this text would come; may be repeated."
    ),
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="System message for the conversation.")
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue the prompt as it stands, without the chat template.")
]
Speculate = Annotated[
    Drafting | None,
    typer.Option(
        "--speculate",
        metavar="|".join(Drafting),
        help="What may draft tokens ahead, by default as the server was told. It never changes an answer.",
        rich_help_panel=_SAMPLING,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Print timings, traversals, drafted and cached tokens to stderr."),
]


@dataclass(frozen=True, slots=True)
class SamplingArguments:
    """How long an answer may get, and how its tokens are drawn."""

    max_tokens: MaxTokens = 512
    temperature: Temperature = None
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repeat_penalty: RepeatPenalty = 1.0
    seed: Seed = None
    stop: Stop = None
    system: System = None

    def sampling_for(self, *, is_conversation: bool) -> Sampling:
        default = CHAT_TEMPERATURE if is_conversation else 0.0
        temperature = default if self.temperature is None else self.temperature
        return Sampling(temperature, self.top_k, self.top_p, self.min_p, self.repeat_penalty)


def speculation_for(drafting: Drafting | None) -> Speculation | None:
    return None if drafting is None else Speculation(drafting.value)
