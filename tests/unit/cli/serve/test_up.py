"""`up --local` says what it serves, and asks for keys where strangers could connect; options fit together."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from shardcompute import api
from shardcompute.cli.options.adapters import parse_adapters
from shardcompute.cli.options.cluster import (
    ClusterArguments,
    DriverPlacementOption,
    ServingArguments,
    WireForm,
)
from shardcompute.cli.options.https import TlsExamples
from shardcompute.cli.serve import foreground
from shardcompute.cli.serve.addresses import check_ports, is_loopback, reachable_host
from shardcompute.cli.serve.foreground import ClusterPlan
from shardcompute.cli.serve.greeting import greeting, invitation
from shardcompute.cli.serve.up import asked_parallelism
from shardcompute.control.placement.parallelism import parse_parallelism
from shardcompute.core.errors import LinkError, UsageError
from shardcompute.core.settings import load_settings
from shardcompute.node.cluster import Cluster, ClusterOptions
from shardcompute.node.rpc.whereabouts import address_towards
from shardcompute.wire import CODECS

from ..conftest import Opening

Cli = Callable[..., Any]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be served, instead of serving it."""
    seen: dict[str, Any] = {}

    def create_app(
        service: object,
        *,
        api_keys: list[str] | None,
        hosts: Any,
        cors_origins: tuple[str, ...],
        image_urls: str,
        page: object,
    ) -> str:
        seen.update(keys=api_keys, hosts=hosts, origins=cors_origins, images=image_urls)
        return "app"

    async def serve(
        app: object, host: str, port: int, *, on_listening: Callable[[str, int], None], tls: object
    ) -> None:
        seen["address"] = (host, port)
        on_listening(host, port or 4321)

    monkeypatch.setattr(api, "create_app", create_app)
    monkeypatch.setattr(api, "serve", serve)
    return seen


def test_up_serves_and_says_where(cli: Cli, opened: Opening, served: dict[str, Any]) -> None:
    result = cli("up", "--local", "org/repo", "--port", "0", "--parallel", "pp=2")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (served["keys"], served["address"]) == (None, ("127.0.0.1", 0))
    assert not served["hosts"].admits("box.test")
    assert served["origins"] == ()
    assert served["images"] == "off"
    assert opened.references == ["org/repo"]
    assert opened.options[0].stages == 2
    said = result.stderr
    assert said.index("opening org/repo") < said.index("fake is ready at http://127.0.0.1:4321")
    assert said.endswith("stopped\n")
    assert opened.service.is_closed


def test_other_machines_need_a_key_which_is_made(cli: Cli, opened: Opening, served: dict[str, Any]) -> None:
    result = cli("up", "--local", "--host", "0.0.0.0", "--port", "0")
    [key] = served["keys"]
    assert len(key) > 20
    assert result.stderr.count(key) == 1, "it is shown once"


def test_a_server_behind_a_proxy_is_named_and_asks_for_keys(
    cli: Cli, opened: Opening, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCOMPUTE_ALLOWED_HOSTS", "a.test, *.b.test")
    cli("up", "--local", "--require-key", "--allowed-host", "box.test", "--port", "0")
    assert len(served["keys"]) == 1
    names = ("box.test", "a.test:443", "x.b.test", "b.test", "c.test")
    assert [served["hosts"].admits(name) for name in names] == [True, True, True, False, False]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(0o600)
    return path


def test_keys_that_were_given_are_asked_for(
    cli: Cli, opened: Opening, served: dict[str, Any], key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file.write_text("one\n\n# of the dashboard\nobserve two\n")
    monkeypatch.setenv("SHARDCOMPUTE_API_KEY", "three")
    result = cli("up", "--local", "--api-key-file", str(key_file), "--port", "0")
    assert served["keys"] == ["three", "one", "observe two"]
    assert not any(f" {key}" in result.stderr for key in ("one\n", "two", "three"))


def test_no_key_is_on_the_command_line(cli: Cli, opened: Opening) -> None:
    for command in (("up",), ("coordinator",), ("driver",), ("run", "hi"), ("status",), ("key", "list")):
        result = cli(*command, "--api-key", "sk-secret")
        assert result.exit_code == 2
        assert "No such option: --api-key" in result.stderr.replace("│", "")


def test_pages_of_chosen_origins_may_call(
    cli: Cli, opened: Opening, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDCOMPUTE_CORS_ORIGINS", "http://a.example")
    cli("up", "--local", "--port", "0")
    assert served["origins"] == ("http://a.example",)
    cli("up", "--local", "--port", "0", "--cors-origin", "http://b.example:3000", "--cors-origin", "*")
    assert served["origins"] == ("http://b.example:3000", "*")
    wrong = cli("up", "--local", "--cors-origin", "b.example")
    assert wrong.exit_code == 2
    assert "--cors-origin: 'b.example' is not a web origin" in wrong.stderr


def test_busy_port_is_said_before_the_model_is_opened(cli: Cli, opened: Opening) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cli("up", "--local", "--port", str(port))
    assert result.exit_code == 2
    assert f"Port {port} is already in use by " in result.stderr
    assert opened.references == []


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "tab\tx", "observe "])
def test_keys_that_no_header_can_carry(cli: Cli, opened: Opening, key: str, key_file: Path) -> None:
    key_file.write_text(f"good\n{key}\n" if key else "\n")
    result = cli("up", "--local", "--api-key-file", str(key_file))
    assert result.exit_code == 2
    assert "API key" in result.stderr
    assert opened.references == []


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "192.168.1.5", "example.org", ""]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--local", "--workers", "2", "--chains", "2"), "--workers and --chains"),
        (("--local", "--no-workers"), "--no-workers"),
        (("--local", "--data-dir", "here"), "--data-dir"),
        (("--kv-memory", "1G"), "--kv-memory"),
        (("--no-workers", "--max-memory", "1G"), "--max-memory"),
        (("--backend", "onnx", "--device", "cuda"), "the onnx backend computes on cpu, not on cuda"),
        (("--api-key-file", "no-such-file"), "there is no file"),
        (("--name", "Not A Name"), "cannot be the name of a cluster"),
        (("--local", "--wire", "int8"), "--wire"),
        (("--local", "--speculate", "off"), "--speculate"),
        (("--wire", "int3"), "cannot be sent as 'int3'"),
    ],
)
def test_options_without_effect_are_refused(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    result = cli("up", "--port", "0", *arguments)
    assert result.exit_code in (2, 6)
    assert said in result.stderr


def test_no_workers_at_all_are_asked_for_by_name(cli: Cli) -> None:
    result = cli("up", "--workers", "0")
    assert result.exit_code == 2
    assert "--no-workers" in result.stderr


def test_ports_are_wanted_together() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    check_ports([("127.0.0.1", port), ("127.0.0.1", 0)])
    with pytest.raises(UsageError, match=f"Port {port} is already in use"):
        check_ports([("127.0.0.1", port), ("127.0.0.1", port)])


def test_address_towards() -> None:
    assert address_towards("tcp://127.0.0.1:7420") == "127.0.0.1"
    with pytest.raises(LinkError):
        address_towards("tcp://name.invalid:7420")


def test_invitation_says_who_can_use_it() -> None:
    far = invitation("sc1.x", "0.0.0.0", machines=8, life_s=3600.0)
    assert "  shardcompute join sc1.x" in far
    assert "good for 8 machines and 1 h" in far[0]
    near = invitation("sc1.x", "127.0.0.1", machines=1, life_s=3600.0)
    assert "--host 0.0.0.0" in near[0]
    assert "good for 1 machine and 1 h" in near[0]
    assert "  shardcompute join sc1.x --data-dir FOLDER" in near


def test_reachable_host() -> None:
    assert reachable_host("127.0.0.1") == "127.0.0.1"
    assert reachable_host("::1") == "[::1]"
    assert reachable_host("0.0.0.0") != "0.0.0.0"


def test_greeting_can_be_pasted() -> None:
    lines = greeting("it's", "http://127.0.0.1:8000", needs_key=True)
    [curl] = [shlex.split(line) for line in lines if "curl" in line]
    assert curl[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer $SHARDCOMPUTE_API_KEY" in curl
    assert '"model": "it\'s"' in curl[-1]
    start = next(i for i, line in enumerate(lines) if "import os" in line)
    code = "\n".join(line[2:] for line in lines[start : start + 4])
    compile(code, "snippet", "exec")
    assert "api_key=os.environ['SHARDCOMPUTE_API_KEY']" in code
    assert not any("Authorization" in line or "api_key" in line for line in greeting("m", "http://h:1"))


def test_greeting_of_a_made_certificate_can_be_pasted() -> None:
    made = TlsExamples("sha256//k=", "ab12", "/home/a b/certificate.pem")
    lines = greeting("m", "https://box:8000", tls=made)
    [curl] = [shlex.split(line) for line in lines if "curl" in line]
    assert curl[:3] == ["curl", "--cacert", "/home/a b/certificate.pem"]
    assert any("Client('https://box:8000', tls_pin='sha256//k=')" in line for line in lines)
    assert any("ab12" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--https", "--tls-cert", "a.pem"), "one or the other"),
        (("--tls-key", "a.pem"), "name it with --tls-cert"),
        (("--tls-cert", "/nowhere/a.pem"), "cannot be read"),
    ],
)
def test_wrong_certificates_are_said_before_anything_is_started(
    cli: Cli, served: dict[str, Any], options: tuple[str, ...], said: str
) -> None:
    result = cli("up", "--local", "--port", "0", *options)
    assert result.exit_code != 0
    assert said in result.stderr
    assert not served


def test_help_names_every_codec() -> None:
    [option] = get_args(WireForm)[1:]
    assert {"auto", *CODECS} <= {word.strip("(),.:") for word in option.help.split()}


@pytest.mark.parametrize(("given", "placement"), [(None, "auto"), ("auto", "auto"), ("here", "here")])
def test_where_drivers_may_sit(given: str | None, placement: str, tmp_path: Path) -> None:
    policy = None if given is None else DriverPlacementOption(given)
    cluster = ClusterArguments(data_dir=tmp_path, driver_placement=policy)
    plan = ClusterPlan(ServingArguments(port=0), cluster, "native")
    placing = plan.cluster_options(load_settings()).placing
    assert placing is not None
    assert placing.drivers == placement


def test_a_single_process_has_nowhere_else_to_drive_from(cli: Cli) -> None:
    result = cli("up", "--local", "--driver-placement", "here")
    assert result.exit_code == 2
    assert "--driver-placement only mean something for a cluster" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("given", "workers", "chains", "asked"),
    [
        (None, None, None, None),
        (None, 3, None, "pp=3"),
        (None, 3, 1, "pp=3"),
        (None, 3, 3, None),
        ("tp=1", 3, None, "tp=1"),
        ("auto", 3, None, "auto"),
        ("tp=3", 3, None, "tp=3"),
        ("pp=2", 3, 2, "pp=2"),
    ],
)
def test_who_asks_for_workers_asks_for_stages(
    given: str | None, workers: int | None, chains: int | None, asked: str | None
) -> None:
    parsed = None if given is None else parse_parallelism(given)
    found = asked_parallelism(parsed, workers, chains)
    assert (None if found is None else str(found)) == asked


def test_one_process_has_no_ranks(cli: Cli) -> None:
    result = cli("up", "--local", "--parallel", "tp=2")
    assert result.exit_code == 2
    assert "one process has no tensor ranks" in result.stderr
    assert cli("up", "--parallel", "tp=two").exit_code == 2


ANY_PORTS = ("--port", "0", "--cluster-port", "0", "--join-port", "0")


@pytest.fixture
def bereft(tmp_path: Path) -> Path:
    """The folder of a cluster that has lost its journal."""
    folder = tmp_path / "bereft"
    with Cluster(ClusterOptions(folder, port=0, join_port=0)):
        pass
    for path in folder.glob("journal.*"):
        path.unlink()
    return folder


def test_a_lost_journal_is_said_and_nothing_is_started(cli: Cli, opened: Opening, bereft: Path) -> None:
    result = cli("up", "--no-workers", "--data-dir", str(bereft), *ANY_PORTS)
    assert result.exit_code == 6
    assert f"the cluster in {bereft} has lost its journal" in result.stderr
    assert "--recover-journal" in result.stderr
    assert opened.references == []


def test_whoever_sits_there_is_asked(cli: Cli, bereft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ClusterOptions] = []
    monkeypatch.setattr(foreground, "has_terminal_input", lambda stream: True)
    monkeypatch.setattr(foreground, "_open", lambda *_: None)
    monkeypatch.setattr(foreground, "_run_leader", lambda start, *_: started.append(start.options))
    arguments = ("up", "--no-workers", "--data-dir", str(bereft), *ANY_PORTS)
    for answer in ("", "n\n", "perhaps\n"):
        result = cli(*arguments, stdin=answer)
        assert result.exit_code == 6
        assert "go on with what is left of it? [y/N]" in result.stderr
    assert started == []
    assert cli(*arguments, stdin="y\n").exit_code == 0
    assert cli(*arguments, "--recover-journal").exit_code == 0
    assert [options.recovers_journal for options in started] == [True, True]


@pytest.mark.parametrize("given", [["polite"], ["=x"], ["polite="], ["a=x", "a=y"]])
def test_adapters_are_given_by_name(given: list[str]) -> None:
    with pytest.raises(UsageError, match="--adapter"):
        parse_adapters(given)


def test_an_adapter_s_folder_may_have_any_name() -> None:
    assert parse_adapters(["polite=/tmp/a=b"]) == {"polite": Path("/tmp/a=b")}


def test_a_shared_store_is_for_coordinators_without_workers(cli: Cli, tmp_path: Path) -> None:
    arguments = ("--data-dir", str(tmp_path / "cluster"), *ANY_PORTS, "--store")
    with_workers = cli("up", "--workers", "1", *arguments, "etcd://127.0.0.1:9")
    assert with_workers.exit_code == 2
    assert "computes nothing itself" in with_workers.stderr
    wrong = cli("coordinator", *arguments, "http://127.0.0.1:9")
    assert wrong.exit_code == 2
    assert "no address of a store" in wrong.stderr
    away = cli("coordinator", *arguments, "etcd://127.0.0.1:9", "--recover-journal")
    assert away.exit_code == 2
    assert "about a journal in a file" in away.stderr
