"""`shardcompute service …`: keep a command running in the background, started by the system."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.options.output import Json
from shardcompute.cli.service.service_files import ACTIONS, Launchd, ServiceSystem, Systemd, describe_service
from shardcompute.cli.service.task_scheduler import TaskScheduler
from shardcompute.core.errors import ShardComputeError, SourceError, UsageError
from shardcompute.core.settings import Settings, load_settings

if TYPE_CHECKING:
    from shardcompute.node.enrolment.stored import EnrolledNode

_PATIENCE_S = 60.0
_PRINT = "--print"
_TOKEN = "sc1."
_RUNS = {"up": "up", "join": "worker", "driver": "driver"}
"""The command that each service runs, once it has joined."""

app = typer.Typer(help="Keep up, join or driver running in the background.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help=f"Which of them: {', '.join(ACTIONS)}.")]


class KeptCommand(msgspec.Struct, frozen=True):
    """What a service runs: a command of ours with its arguments."""

    command: str
    arguments: tuple[str, ...]


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def install(
    ctx: typer.Context,
    command: Annotated[str, typer.Argument(metavar="NAME", help=f"What to run: {', '.join(ACTIONS)}.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its own arguments and options.")
    ] = None,
    print_only: Annotated[bool, typer.Option(_PRINT, help="Show the file and change nothing.")] = False,
) -> None:
    """Have systemd, launchd or Windows' Task Scheduler run a command for this user, and start it again when it fails.

    For example: shardcompute service install up --host 0.0.0.0. With join or driver and a token the cluster is joined
    at once, and the token is not kept.
    """
    screen, settings = open_screen(), load_settings()
    given = list(arguments or ())
    is_printed = print_only or _PRINT in given
    given = [argument for argument in given if argument != _PRINT]
    _check_name(command)
    token = next((argument for argument in given if argument.startswith(_TOKEN)), None)
    kept = KeptCommand(_RUNS[command], tuple(argument for argument in given if argument != token))
    parameters = _parse(ctx, kept)
    system = find_system()
    text = system.render(describe_service(command, settings))
    if is_printed:
        screen.say(f"runs {_describe(kept)}; {system.path(command)} would hold:", "dim")
        screen.write(text)
        return
    if command != "up":
        _join(command, token, parameters, settings, screen)
    from shardcompute.security.private_files import replace_private

    was_there = system.path(command).exists()
    replace_private(_arguments_path(settings, command), msgspec.json.encode(kept))
    replace_private(system.path(command), text.encode())
    screen.say(f"{system.path(command)} is {'replaced' if was_there else 'written'}; to start it:")
    screen.say("")
    for step in system.next_steps(command):
        screen.say(f"  {step}")
    screen.say("")
    if settings.hub_token is not None:
        screen.say("HF_TOKEN is not kept for the service: fetch what needs it first, with pull", "yellow")
    if settings.api_key is not None:
        screen.say("SHARDCOMPUTE_API_KEY is not kept for the service: give --api-key-file", "yellow")


@app.command()
def uninstall(name: Name) -> None:
    """Stop a service, and forget it. What it has fetched and joined stays."""
    screen, settings = open_screen(), load_settings()
    _check_name(name)
    system = find_system()
    path, own = system.path(name), _arguments_path(settings, name)
    if not path.exists() and not own.exists():
        raise UsageError(f"there is no service {name}", hint="shardcompute service status lists them")
    for stop in system.stop_commands(name):
        problem = _call(stop)
        if problem:
            screen.say(f"it could not be stopped ({problem}); if it runs: {shlex.join(stop)}")
    for each in (path, own):
        try:
            each.unlink(missing_ok=True)
        except OSError as error:
            raise SourceError(
                f"{each} cannot be deleted: {error.strerror}", hint="delete it by hand"
            ) from error
    screen.say(f"the service {name} is gone")


@app.command()
def status(json: Json = False) -> None:
    """Which services there are, and whether they run."""
    screen, settings = open_screen(), load_settings()
    system = find_system()
    there = [name for name in ACTIONS if system.path(name).exists()]
    found = [
        {
            "name": name,
            "is_running": not _call(system.state_command(name)),
            "runs": _describe_kept(settings, name),
            "file": str(system.path(name)),
        }
        for name in there
    ]
    if json:
        screen.write_json(found)
    elif not found:
        screen.say("there is no service; shardcompute service install up makes one")
    else:
        rows = [
            (
                str(each["name"]),
                "running" if each["is_running"] else "stopped",
                str(each["runs"]),
                str(each["file"]),
            )
            for each in found
        ]
        screen.write_table(("NAME", "STATE", "RUNS", "FILE"), rows)


@app.command("exec", hidden=True)
def execute(
    ctx: typer.Context,
    name: Name,
    environment: Annotated[list[str] | None, typer.Option("--with", metavar="NAME=VALUE")] = None,
) -> None:
    """Run what was installed, in this process. `environment` is for systems whose services can have none."""
    _check_name(name)
    for setting in environment or ():
        key, _, value = setting.partition("=")
        os.environ[key] = value
    kept = _read_kept(load_settings(), name)
    command = _commands(ctx)[kept.command]
    root: Any = ctx.find_root()
    with command.make_context(kept.command, list(kept.arguments), parent=root) as inner:
        command.invoke(inner)


def find_system(platform: str = sys.platform) -> ServiceSystem:
    """What runs background programs here. UsageError where it is none that we know."""
    if platform == "darwin":
        return Launchd(Path.home() / "Library" / "LaunchAgents", _user_id())
    if platform == "win32":
        return TaskScheduler(load_settings().data_dir / "services")
    if platform.startswith("linux") and shutil.which("systemctl") is not None:
        return Systemd(Path.home() / ".config" / "systemd" / "user")
    raise UsageError(
        "this machine has neither systemd nor launchd nor a Task Scheduler",
        hint="have its own service manager run: shardcompute up, or shardcompute worker",
    )


def _user_id() -> int:
    if sys.platform == "win32":
        return 0
    else:
        return os.getuid()


def _join(
    command: str, token: str | None, parameters: dict[str, Any], settings: Settings, screen: Screen
) -> None:
    """Use the token now: what it leads to is kept in the member's folder, which must be there without one."""
    from shardcompute.node.enrolment.stored import join_from, open_enrolled
    from shardcompute.security.names import Role
    from shardcompute.security.tokens import parse_token

    role = Role.WORKER if command == "join" else Role.DRIVER
    usual = settings.data_dir / ("worker" if command == "join" else "driver")
    folder = (parameters.get("data_dir") or usual).absolute()
    if token is None:
        open_enrolled(folder, role)
        return
    members: Sequence[EnrolledNode]
    if role is Role.WORKER:
        members = _join_places(folder, token, parameters)
    else:
        members = [join_from(folder, parse_token(token), role)]
    ids = ", ".join(member.credentials.identity.node_id for member in members)
    screen.say(f"joined {members[0].credentials.own.cluster} as {ids}")


def _join_places(folder: Path, token: str, parameters: dict[str, Any]) -> Sequence[EnrolledNode]:
    """With every device on which the service will compute."""
    from shardcompute.backends.device_choice import choose_devices
    from shardcompute.cli.serve.places import join_places
    from shardcompute.security.tokens import parse_token

    parsed = parse_token(token)
    chosen = choose_devices(parameters["device"], str(parameters["backend"]))
    return join_places(folder, chosen, parsed).members


def _parse(ctx: typer.Context, kept: KeptCommand) -> dict[str, Any]:
    """The command's parameters; its own complaint if they are wrong, now rather than in the background."""
    chosen = _commands(ctx)[kept.command]
    with chosen.make_context(f"shardcompute {kept.command}", list(kept.arguments)) as inner:
        parameters: dict[str, Any] = inner.params
    if parameters.get("token"):
        raise UsageError("that is no token, which starts with sc1", hint="copy it again, as one word")
    for name in ("data_dir", "api_key_file", "model"):
        path = parameters.get(name)
        if path and not Path(path).is_absolute() and (name != "model" or Path(path).exists()):
            raise UsageError(f"{path} depends on where the service is started", hint="give the whole path")
    return parameters


def _commands(ctx: typer.Context) -> dict[str, Any]:
    root: Any = ctx.find_root().command
    commands: dict[str, Any] = root.commands
    return commands


def _check_name(name: str) -> None:
    if name not in ACTIONS:
        raise UsageError(f"{name!r} cannot run as a service", hint=f"use one of: {', '.join(ACTIONS)}")


def _arguments_path(settings: Settings, name: str) -> Path:
    return settings.data_dir / "services" / f"{name}.json"


def _read_kept(settings: Settings, name: str) -> KeptCommand:
    from shardcompute.security.private_files import read_private

    path = _arguments_path(settings, name)
    hint = f"run again: shardcompute service install {name}"
    try:
        return msgspec.json.decode(read_private(path), type=KeptCommand)
    except FileNotFoundError:
        raise UsageError(f"there is no service {name} in {path.parent}", hint=hint) from None
    except msgspec.DecodeError as error:
        raise SourceError(f"{path} is damaged: {error}", hint=hint) from error


def _describe_kept(settings: Settings, name: str) -> str:
    try:
        kept = _read_kept(settings, name)
    except ShardComputeError as error:
        return error.message
    return _describe(kept)


def _describe(kept: KeptCommand) -> str:
    return " ".join(["shardcompute", kept.command, *kept.arguments])


def _call(command: list[str]) -> str:
    """Why a command did not end well; empty if it did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
