"""`shardcompute chat`: talk to a model that a cluster serves."""

from __future__ import annotations

from typing import Annotated

import typer

from shardcompute.cli.chat.answer import AnswerOptions
from shardcompute.cli.chat.conversation import Conversation
from shardcompute.cli.chat.remote import choose_model
from shardcompute.cli.chat.terminal import read_terminal_line
from shardcompute.cli.cluster.access import ApiKey, DataDir, Url, open_cluster
from shardcompute.cli.cluster.completion import complete_served
from shardcompute.cli.console import open_screen
from shardcompute.cli.options import common as options
from shardcompute.core.generation import Sampling
from shardcompute.core.settings import load_settings


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Name of a model that the cluster serves; by default the first.",
            autocompletion=complete_served,
        ),
    ] = "",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repeat_penalty: options.RepeatPenalty = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    system: options.System = None,
    speculate: options.Speculate = None,
    verbose: options.Verbose = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Talk to a model that a cluster serves; /help in the conversation tells more.

    --url takes any ShardCompute server.
    """
    answer_options = AnswerOptions(
        max_tokens=max_tokens,
        sampling=Sampling(temperature, top_k, top_p, min_p, repeat_penalty),
        seed=seed,
        stop=tuple(stop or ()),
        system=system,
        is_raw=False,
        speculation=options.wish_for(speculate),
    )
    screen = open_screen()
    with open_cluster(url, api_key, data_dir) as client:
        service = choose_model(client, model).as_service()
        folder = load_settings().data_dir
        Conversation(service, answer_options, screen, folder, is_verbose=verbose).hold(read_terminal_line)
