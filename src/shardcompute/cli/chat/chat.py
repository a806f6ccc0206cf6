"""`shardcompute chat`: talk to a model that a cluster serves."""

from __future__ import annotations

from typing import Annotated

import typer

from shardcompute.cli.chat.answer import answer_options_of
from shardcompute.cli.chat.conversation import Conversation
from shardcompute.cli.chat.images import read_images
from shardcompute.cli.chat.remote import choose_model
from shardcompute.cli.chat.terminal import read_terminal_line
from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.cluster.completion import complete_served
from shardcompute.cli.console import open_screen
from shardcompute.cli.options.generation import Images, SamplingArguments, Speculate, Verbose
from shardcompute.cli.options.records import with_options
from shardcompute.core.settings import load_settings


@with_options
def chat(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Name of a model that the cluster serves; by default the first.",
            autocompletion=complete_served,
        ),
    ] = "",
    image: Images = None,
    sampling: SamplingArguments,
    speculate: Speculate = None,
    verbose: Verbose = False,
    at: ClusterLocation,
) -> None:
    """Talk to a model that a cluster serves; /help in the conversation tells more.

    --url takes any ShardCompute server.
    """
    answer_options = answer_options_of(sampling, speculate, is_conversation=True)
    screen = open_screen()
    with at.connect() as client:
        service = choose_model(client, model).as_service()
        folder = load_settings().data_dir
        talk = Conversation(
            service, answer_options, screen, folder, read_images(image or ()), is_verbose=verbose
        )
        talk.hold(read_terminal_line)
