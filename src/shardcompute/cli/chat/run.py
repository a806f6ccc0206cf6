"""`shardcompute run`: ask a model something, or talk to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shardcompute.cli.chat.answer import (
    AnswerOptions,
    answer_options_of,
    as_json,
    as_messages,
    check_chat_template,
    describe_interruption,
    describe_timings,
    make_request,
    take_answer,
)
from shardcompute.cli.chat.conversation import Conversation
from shardcompute.cli.chat.images import read_images
from shardcompute.cli.chat.prompt import (
    join_prompt,
    read_piped,
    split_arguments,
)
from shardcompute.cli.chat.receipt_file import ReceiptFile, check_receipt_option
from shardcompute.cli.chat.remote import find_remote
from shardcompute.cli.chat.shares import sharing
from shardcompute.cli.chat.terminal import read_terminal_line
from shardcompute.cli.cluster.access import ClusterLocation, TlsPin, Url
from shardcompute.cli.cluster.completion import complete_fetched
from shardcompute.cli.console import Screen, has_terminal_input, open_screen, standard_input
from shardcompute.cli.models.opening import OpenModel, open_with_progress
from shardcompute.cli.options.adapters import AdapterArguments
from shardcompute.cli.options.engine import EngineArguments, Stages, check_device
from shardcompute.cli.options.generation import Images, Raw, SamplingArguments, Speculate, Verbose
from shardcompute.cli.options.keys import ClientKeyFile
from shardcompute.cli.options.records import changed_options, with_options
from shardcompute.cli.options.shares import ShareArguments
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import load_settings


@with_options
def run(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model: smollm2 (the default), a name like qwen3:8b, a folder, a .gguf file or org/repo.",
            autocompletion=complete_fetched,
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="What to ask.")] = None,
    sampling: SamplingArguments,
    image: Images = None,
    raw: Raw = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one object with the answer, its tokens and timings.")
    ] = False,
    speculate: Speculate = None,
    verbose: Verbose = False,
    receipt: Annotated[
        Path | None,
        typer.Option(
            "--receipt",
            metavar="FILE",
            help="Write there who of the cluster signed for the answer; `receipt verify FILE` checks it.",
        ),
    ] = None,
    engine: EngineArguments,
    adapters: AdapterArguments,
    stages: Stages = 1,
    shares: ShareArguments,
    local: Annotated[
        bool, typer.Option("--local", help="Answer in this process, even if a cluster could.")
    ] = False,
    url: Url = None,
    api_key_file: ClientKeyFile = None,
    tls_pin: TlsPin = None,
) -> None:
    """Ask a model something, or talk to it.

    A cluster answers if one runs on this machine and serves the model, or the one at --url; otherwise, and with
    --local or any engine option, this process does. With --adapter it answers with that adapter. With
    --share-layers this process answers too, and has two workers compute those layers without learning anything.

    The answer is streamed to stdout. What is piped into stdin is the prompt, or follows PROMPT after an empty
    line. Without either, on a terminal, a conversation begins; /help in it tells more. Models that see are shown
    what --image names.

    An argument that stands alone is taken for the model if it is an existing path, or one word that has a
    slash in it, ends in .gguf or is the default's name; otherwise it is the prompt for the default model. To be
    sure, give both.
    """
    screen, settings = open_screen(), load_settings()
    reference, question = _read_question(screen, model, prompt, is_json=json)
    answer_options = answer_options_of(sampling, speculate, is_raw=raw, is_conversation=question is None)
    images = read_images(image or (), is_raw=raw)
    check_device(engine.device, engine.backend)
    is_quiet = question is not None and not verbose
    remote = None
    if not shares.is_given:
        remote = find_remote(
            reference,
            is_local=local,
            has_engine=bool(changed_options(engine) or changed_options(adapters)) or stages != 1,
            url=url,
            api_key_file=api_key_file,
            tls_pin=tls_pin,
            say=lambda text: None if is_quiet else screen.say(text, "dim"),
        )
    check_receipt_option(receipt, remote, is_question=question is not None)
    with ExitStack() as stack:
        if remote is None:
            if len(adapters.adapter or ()) > 1:
                raise UsageError(
                    "run answers with one adapter", hint="serve several with `up`, and choose by request"
                )
            answer_options = replace(answer_options, adapter=next(iter(adapters.folders), ""))
            options = engine.engine_options(
                stages, lambda text: None if is_quiet else screen.say(text, "dim"), adapters
            )
            if shares.is_given:
                if local or stages != 1:
                    raise UsageError(
                        "--share-layers cuts the model itself, and needs a cluster",
                        hint="leave out --local and --stages",
                    )
                at = ClusterLocation(url, api_key_file, tls_pin=tls_pin)
                options = stack.enter_context(sharing(reference, at, shares, options, screen.say))
            opened = open_with_progress(reference, settings, options, screen, is_quiet=is_quiet)
        else:
            opened = OpenModel(remote.as_service(), load_s=0.0)
        stack.enter_context(opened.service)
        check_chat_template(opened.service, answer_options)
        if question is None:
            talk = Conversation(
                opened.service, answer_options, screen, settings.data_dir, images, is_verbose=verbose
            )
            talk.hold(read_terminal_line)
        else:
            messages = as_messages(answer_options, question, images)
            asking = None if receipt is None else ReceiptFile(receipt, remote)
            _answer(opened, answer_options, messages, screen, asking, is_json=json, is_verbose=verbose)


def _read_question(
    screen: Screen, model: str | None, prompt: str | None, *, is_json: bool
) -> tuple[str, str | None]:
    """The model's reference and the whole prompt; no prompt means a conversation."""
    reference, asked = split_arguments(model, prompt)
    stdin = standard_input()
    if asked is None and has_terminal_input(stdin):
        if is_json:
            raise UsageError("--json needs a prompt", hint="give one as an argument or pipe it in")
        return reference, None
    return reference, join_prompt(asked, read_piped(stdin, screen.say))


def _answer(
    opened: OpenModel,
    answer_options: AnswerOptions,
    messages: Sequence[Mapping[str, Any]],
    screen: Screen,
    receipt: ReceiptFile | None,
    *,
    is_json: bool,
    is_verbose: bool,
) -> None:
    service = opened.service
    request = make_request(service, answer_options, messages)
    if receipt is not None:
        request = receipt.asked_for(request)
    reply = take_answer(service, request, _ignore if is_json else screen.write, messages)
    if not is_json and not reply.text.endswith("\n"):
        screen.write("\n")
    if reply.finish == "cancelled":
        raise KeyboardInterrupt
    if is_json:
        described = as_json(service.name, request, reply, opened.load_s)
        # A server tells text, not ids.
        screen.write_json(described if reply.token_ids else {**described, "token_ids": None})
    if receipt is not None:
        screen.say(receipt.write(), "dim")
    for told in reply.interruptions:
        screen.say(describe_interruption(told), "dim")
    if is_verbose:
        screen.say(describe_timings(reply, opened.load_s), "dim")


def _ignore(text: str) -> None:
    """The whole answer is printed at its end."""
