"""Commands that talk to a cluster: over its real routes, with a cluster without sockets behind them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shardcompute.cli.chat import remote
from shardcompute.cli.cluster.access import ClusterAddress, ClusterLocation
from shardcompute.cli.cluster.following import follow_load
from shardcompute.cli.cluster.text import draw_stages
from shardcompute.cli.format import format_duration, parse_duration
from shardcompute.cluster_client import ClusterClient
from shardcompute.control import events as happened
from shardcompute.control.placement.parallelism import Parallelism
from shardcompute.control.state import Move
from shardcompute.core.errors import CancelledError, CapacityError, SourceError, UsageError, WouldReplaceError
from shardcompute.core.generation import GenerationRequest
from shardcompute.node.admin.views import FetchView
from shardcompute.security import Role, parse_token
from shardcompute.security.local_secret import SECRET_FILE
from support.swarm.fake_cluster import MODEL, NOW_S

from ..cluster_lab import HERE, Lab, Server, event, say_running
from ..conftest import Opening

Cli = Callable[..., Any]


# Where the cluster is


def test_the_cluster_on_this_machine_is_found(cli: Cli, home: Path, lab: Lab, recognised: None) -> None:
    say_running(home / "cluster")
    assert cli("status").exit_code == 0
    (home / "key").write_text("# mine\noperate other\n")
    (home / "key").chmod(0o600)
    assert cli("status", "--api-key-file", str(home / "key")).exit_code == 0
    say_running(home / "elsewhere", api_url="http://127.0.0.1:9001")
    (home / "elsewhere" / SECRET_FILE).unlink()
    assert cli("ps", "--data-dir", str(home / "elsewhere")).exit_code == 0
    assert lab.addresses == [
        ("http://127.0.0.1:9000", "sk-local-own"),
        ("http://127.0.0.1:9000", "other"),
        ("http://127.0.0.1:9001", None),
    ]


@pytest.mark.parametrize("fields", [{"pid": 2**22 + 1}, {"create_time_s": 1.0}, {"api_url": ""}])
def test_what_a_crash_left_behind_is_no_cluster(
    cli: Cli, home: Path, lab: Lab, recognised: None, fields: dict[str, Any]
) -> None:
    say_running(home / "cluster", **fields)
    result = cli("status")
    assert result.exit_code == 2
    assert "no cluster runs on this machine" in result.stderr
    assert lab.addresses == []


@pytest.mark.parametrize("url", ["box:8000", "ftp://box", "http://", "http://a b", "http://[::1"])
def test_addresses_that_are_none(cli: Cli, lab: Lab, url: str) -> None:
    result = cli("status", "--url", url)
    assert result.exit_code == 2
    assert "is not an HTTP address" in result.stderr


def test_an_address_for_openai_clients_is_understood(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDCOMPUTE_API_KEY", "k")
    assert ClusterLocation("http://box:8000/v1/").find() == ClusterAddress("http://box:8000", "k", False)
    with pytest.raises(UsageError, match="two clusters"):
        ClusterLocation("http://box:8000", None, home).find()


def test_the_cluster_on_this_machine_is_trusted_by_its_certificate(home: Path, recognised: None) -> None:
    say_running(home / "cluster", api_url="https://127.0.0.1:9000", api_certificate="PEM")
    address = ClusterLocation().find()
    assert address is not None
    assert (address.url, address.tls_certificate) == ("https://127.0.0.1:9000", "PEM")
    with pytest.raises(UsageError, match="--tls-pin is for a server at --url"):
        ClusterLocation(tls_pin="sha256//x").find()


# What is shown


def test_status_is_one_screen(cli: Cli, lab: Lab) -> None:
    result = cli("status", *HERE)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("cluster home (")
    assert lines[0].endswith("nodes: 3 ready")
    assert lines[1] == "load: 0 running, 0 waiting, 0.0 tok/s, KV used: 0% of KV reserved"
    assert any(line.startswith("org/tiny: serving, 1 of 1 chain (int8, 6 layers") for line in lines)
    (row,) = (line for line in lines if line.startswith("  |"))
    assert row.count("|") == len(lab.admin.state().chains[0].stages) + 1
    assert "A 0-" in row
    assert any("bottleneck:" in line for line in lines)
    assert any(line.startswith("  driver on the coordinator: ") for line in lines)
    assert any("expect" in line and "for many" in line for line in lines)


def test_status_as_json(cli: Cli, lab: Lab) -> None:
    told = json.loads(cli("status", "--json", *HERE).stdout)
    assert told["chains"][0]["status"] == "ready"
    assert {node["id"] for node in told["nodes"]} == {"a", "b", "c"}


def test_status_watches(cli: Cli, lab: Lab) -> None:
    lab.script = [lambda: lab.cluster.coordinator.post(happened.NodeDrained("a"))]
    first, second = map(json.loads, cli("status", "--json", "--watch", *HERE).stdout.splitlines())
    assert [node["is_draining"] for node in first["nodes"]] == [False] * 3
    assert [node["is_draining"] for node in second["nodes"]] == [True, False, False]

    def interrupt() -> None:
        raise KeyboardInterrupt

    lab.script = [interrupt]
    result = cli("status", "--watch", *HERE)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("cluster home") == 1


def test_rows_are_cut_where_layers_are(lab: Lab) -> None:
    (chain,) = lab.admin.state().chains
    names = {"a": "laptop", "b": "box"}
    for width in (20, 60, 100):
        row = draw_stages(chain.stages, MODEL.layer_count, names, width)
        assert len(row) == width
    assert row.startswith("|-")
    assert " laptop 0-" in row


def test_nodes_say_on_which_way_they_reach_each_other(cli: Cli, lab: Lab) -> None:
    why = "direct: nobody answers"
    lab.cluster.coordinator.post(happened.LinkMeasured("a", "b", 0.025, 2e6, rung="relayed", remark=why))
    lab.cluster.coordinator.post(happened.LinkMeasured("a", "c", 0.001, 1e8))
    assert f"relayed, 25.0 ms ({why})" in cli("nodes", *HERE).stderr
    told = cli("nodes", "--links", *HERE).stderr
    assert re.search(r"relayed\s+25\.0 ms\s+1\.9 MiB/s", told)
    assert re.search(r"direct\s+1\.0 ms\s+95\.4 MiB/s", told)
    assert cli("nodes", "--links", "--json", *HERE).exit_code == 2


def test_nodes_as_table_map_and_json(cli: Cli, lab: Lab) -> None:
    lab.cluster.join("gone1", name="former")
    lab.cluster.coordinator.post(happened.NodeLeft("gone1", 1))
    table = cli("nodes", *HERE).stdout
    assert table.splitlines()[0].split() == ["NAME", "ID", "STATUS", "DEVICE", "MEMORY", "LAYERS"]
    assert "org/tiny 0-" in table
    assert "former" not in table
    assert "A: speed not measured, guessed" in table.splitlines()
    assert "former" in cli("nodes", "--all", *HERE).stdout
    drawn = cli("nodes", "--map", *HERE).stdout.splitlines()
    assert drawn[0] == "org/tiny: serving, 6 layers"
    assert max(map(len, drawn)) <= 80
    legend = drawn.index("# serves, + loads, o stands by, - on its disk, . nothing")
    rows = {line.split()[0]: line.split()[1] for line in drawn[legend + 1 :]}
    assert set(rows) == {"A", "B", "C"}
    for stage in lab.admin.state().chains[0].stages:
        assert rows[stage.node.upper()][stage.start : stage.stop] == "#" * (stage.stop - stage.start)
    assert len(json.loads(cli("nodes", "--json", *HERE).stdout)) == 3
    assert cli("nodes", "--json", "--map", *HERE).exit_code == 2
    assert cli("nodes", "--all", "--map", *HERE).exit_code == 2


def test_ps(cli: Cli, lab: Lab) -> None:
    assert "nothing has been asked" in cli("ps", *HERE).stderr
    with lab.cluster.pool.requests.open("org/tiny", "org/tiny#1", GenerationRequest((0,) * 7, 1)):
        (row,) = cli("ps", *HERE).stdout.splitlines()[1:]
        assert row.split()[:5] == ["1", "org/tiny", "org/tiny#1", "waiting", "7"]
        (told,) = json.loads(cli("ps", "--json", *HERE).stdout)
        assert told["state"] == "waiting"


def test_chains_of_several_exactness_classes_are_told(cli: Cli, lab: Lab) -> None:
    told = "chain org/tiny#1 of org/tiny mixes 2 exactness classes"
    assert told not in cli("nodes", *HERE).stderr
    lab.cluster.join("a", 500, exactness="onnx-1.31/float32/avx2")
    for command in ("nodes", "ps"):
        assert told in cli(command, *HERE).stderr
    assert (
        "mixes 2" in json.loads(cli("plan", "org/tiny", "--weights", "int8", "--json", *HERE).stdout)["text"]
    )


def test_plan(cli: Cli, lab: Lab) -> None:
    result = cli("plan", "org/tiny", "--weights", "int8", *HERE)
    assert result.exit_code == 0
    assert "plan for org/tiny" in result.stdout
    assert "bottleneck" in result.stdout
    assert "driver on the coordinator: " in result.stdout
    told = json.loads(cli("plan", "org/tiny", "--weights", "int8", "--json", *HERE).stdout)
    assert told["chains"][0]["is_possible"]
    assert cli("plan", "org/tiny", "--weights", "int8", "--chains", "4", *HERE).exit_code == 7


# What is done


def test_load_shows_how_far_it_is_and_ends_when_served(
    cli: Cli, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = FetchView(model="org/tiny", name="org/tiny", form="int8", chains=2, status="fetching")
    asked: list[Any] = []

    def load_model(*arguments: Any, adapters: dict[str, str], **options: Any) -> FetchView:
        asked.append((*arguments, *options.values(), adapters))
        return order

    monkeypatch.setattr(lab.admin, "load_model", load_model)
    lab.cluster.join("d", 1000)
    lab.script = [
        lambda: lab.cluster.coordinator.post(happened.ModelRequested(MODEL, 2)),
        lab.cluster.coordinator.settle,
    ]
    form = ("--weights", "int8", "--kv-type", "float16", "--parallel", "tp=2:reduce,pp=3")
    beside = ("--adapter", "calm=/tmp/calm", "--adapter", "wild=/tmp/a=b")
    result = cli("load", "org/tiny", *form, "--chains", "2", "--via-coordinator", *beside, *HERE)
    assert result.exit_code == 0
    adapters = {"calm": "/tmp/calm", "wild": "/tmp/a=b"}
    shape = Parallelism(2, 3, "reduce")
    assert asked == [("org/tiny", "int8", 2, False, True, "float16", shape, adapters)]
    assert "loading org/tiny" in result.stderr
    assert result.stderr.endswith("org/tiny is served by 2 of 2 chains\n")


@pytest.mark.parametrize("answer", ["y", "n", None], ids=["yes", "no", "nobody there"])
def test_load_asks_before_it_replaces(
    cli: Cli, lab: Lab, monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    asked: list[bool] = []

    def load_model(*_: Any, replaces: bool, **__: Any) -> FetchView:
        asked.append(replaces)
        if not replaces:
            raise WouldReplaceError("serving it would replace org/tiny, which is answering 3 requests")
        return _order()

    monkeypatch.setattr(lab.admin, "load_model", load_model)
    if answer is not None:
        monkeypatch.setattr("shardcompute.cli.cluster.load.has_terminal_input", lambda _: True)
        monkeypatch.setattr("builtins.input", lambda: answer)
    result = cli("load", "org/tiny", "--weights", "int8", *HERE)
    assert "answering 3 requests" in result.stderr
    assert asked == ([False, True] if answer == "y" else [False])
    assert result.exit_code == (2 if answer is None else 0)
    assert ("--replace" in result.stderr) is (answer is None)
    assert ("nothing was changed" in result.stderr) is (answer == "n")
    assert cli("load", "org/tiny", "--weights", "int8", "--replace", *HERE).exit_code == 0


def test_unload_asks_before_it_ends_answers(cli: Cli, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with lab.cluster.pool.requests.open("org/tiny", "org/tiny#1", GenerationRequest((0,), 1)):
        refused = cli("unload", "org/tiny", *HERE)
        assert refused.exit_code == 2
        assert "is answering 1 request" in refused.stderr
        monkeypatch.setattr("shardcompute.cli.cluster.load.has_terminal_input", lambda _: True)
        monkeypatch.setattr("builtins.input", lambda: "")
        assert "nothing was changed" in cli("unload", "org/tiny", *HERE).stderr
        assert lab.cluster.coordinator.state.models["org/tiny"].is_wanted
        assert cli("unload", "org/tiny", "--yes", *HERE).exit_code == 0
    assert not lab.cluster.coordinator.state.models["org/tiny"].is_wanted


def test_load_that_fails_ends_as_the_cluster_did(cli: Cli, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.script = [lambda: lab.admin._fetches.join()]
    result = cli("load", "org/none", *HERE)
    assert result.exit_code == 6
    assert "offline" in result.stderr.lower()


def _order(**changes: Any) -> FetchView:
    fields = {"model": "org/tiny", "name": "org/tiny", "form": "int8", "chains": 1, "status": "fetching"}
    return FetchView(**{**fields, **changes})


class Heard:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def start(self, label: str, total_bytes: int | None) -> None:
        self.told.append((label, total_bytes))

    def advance(self, count_bytes: int) -> None:
        self.told.append(count_bytes)

    def finish(self) -> None:
        self.told.append("finish")


def test_following_tells_fetching_then_loading(lab: Lab) -> None:
    state = lab.admin.state()
    fetching = replace(
        state, fetches=(_order(doing="a.gguf", done_bytes=30, total_bytes=100),), models=(), chains=()
    )
    half = [replace(stage, fraction=0.5) for stage in state.chains[0].stages]
    loading = replace(
        state,
        models=(replace(state.models[0], status="loading", ready_chains=0),),
        chains=(replace(state.chains[0], stages=tuple(half)),),
    )
    heard = Heard()
    nothing = replace(state, models=(), chains=())
    assert follow_load([fetching, nothing, loading, state], _order(), heard) == state.models[0]
    total = sum(stage.memory_bytes for stage in half)
    assert heard.told == [
        ("a.gguf", 100),
        30,
        "finish",
        (f"loading onto {len(half)} machines", total),
        total // 2,
        "finish",
    ]


def test_following_ends_when_it_will_not_be_served(lab: Lab) -> None:
    state = lab.admin.state()
    short = replace(state.models[0], status="unservable", missing_bytes=9, reasons=("too small",))
    with pytest.raises(CapacityError, match="too small"):
        follow_load([replace(state, models=(short,))], _order(), Heard())
    with pytest.raises(SourceError, match="stopped"):
        follow_load([], _order(), Heard())
    loading = replace(state.models[0], status="loading", ready_chains=0)
    with pytest.raises(CancelledError):
        follow_load(
            [replace(state, models=(loading,)), replace(state, models=())],
            _order(),
            Heard(),
        )
    partly = replace(state.models[0], wanted_chains=2, missing_bytes=9, reasons=("no room",))
    served = follow_load([replace(state, models=(partly,))], _order(chains=2), Heard())
    assert served.ready_chains == 1


def test_unload(cli: Cli, lab: Lab) -> None:
    assert cli("unload", "org/none", *HERE).exit_code == 3
    assert cli("unload", "org/tiny", *HERE).exit_code == 0
    assert not lab.cluster.coordinator.state.models["org/tiny"].is_wanted


def test_drain_waits_until_the_node_has_left(cli: Cli, lab: Lab) -> None:
    lab.script = [lab.cluster.coordinator.settle]
    result = cli("drain", "A", *HERE)
    assert result.exit_code == 0
    assert result.stderr.endswith("A is empty and has left\n")
    assert lab.cluster.coordinator.state.nodes["a"].status == "gone"
    unknown = cli("drain", "nobody", *HERE)
    assert unknown.exit_code == 2
    assert "no node 'nobody'" in unknown.stderr


def test_plan_keeps_a_layout_and_lets_it_go(cli: Cli, lab: Lab) -> None:
    kept = cli("plan", "org/tiny", "--keep", *HERE)
    assert kept.exit_code == 0
    assert "org/tiny stays where it is, also after a restart" in kept.stderr
    assert lab.cluster.coordinator.state.models["org/tiny"].is_kept
    assert "its layout is kept" in cli("status", *HERE).stdout
    told = json.loads(cli("plan", "org/tiny", "--no-keep", "--json", *HERE).stdout)
    assert told == {"model": "org/tiny", "is_kept": False}
    assert not lab.cluster.coordinator.state.models["org/tiny"].is_kept
    assert cli("plan", "org/none", "--keep", *HERE).exit_code != 0


def test_plan_tells_of_moves_why_and_what_came_of_them(cli: Cli, lab: Lab) -> None:
    assert "has not moved" in cli("plan", "org/tiny", "--moves", *HERE).stdout
    state = lab.cluster.coordinator.state
    [chain] = state.live_chains()
    moves = (
        Move(
            1,
            chain.id,
            chain.model,
            "68% better: from a to b",
            NOW_S,
            False,
            0.02,
            0.01,
            0.02,
            outcome="done",
        ),
        Move(2, chain.id, chain.model, "b is to be relieved", NOW_S, True),
    )
    lab.cluster.coordinator.state = msgspec.structs.replace(state, moves=moves)
    told = cli("plan", "org/tiny", "--moves", *HERE).stdout.splitlines()
    assert told == [
        f"{chain.id}, move 2: b is to be relieved",
        "  what came of it: not known yet",
        f"{chain.id}, move 1: 68% better: from a to b",
        "  expected: a step of one stream takes 10.0 ms instead of 20.0 ms",
        "  what came of it: done",
    ]
    read = json.loads(cli("plan", "org/tiny", "--moves", "--json", *HERE).stdout)
    assert [move["number"] for move in read[chain.id]] == [2, 1]
    assert cli("plan", "org/none", "--moves", *HERE).exit_code == 2


def test_drain_tells_when_the_node_was_lost(cli: Cli, lab: Lab) -> None:
    lab.script = [lambda: lab.cluster.coordinator.post(happened.NodeLost("a", 1, "died", NOW_S))]
    result = cli("drain", "a", *HERE)
    assert result.exit_code == 0
    assert "was lost" in result.stderr


def test_tokens_are_made_listed_and_revoked(cli: Cli, lab: Lab) -> None:
    assert "there is no token" in cli("token", "list", *HERE).stderr
    made = cli("token", "create", "--expires", "1h", "--uses", "1", *HERE)
    assert made.exit_code == 0
    assert made.stdout.startswith("shardcompute join sc1.")
    (kept,) = lab.admin.tokens()
    assert (kept.expires_at_s, kept.max_uses) == (3600, 1)
    secret = made.stdout.split()[-1]
    listed = cli("token", "list", *HERE)
    assert kept.id in listed.stdout
    assert secret not in listed.output + made.stderr
    assert cli("token", "revoke", kept.id, *HERE).exit_code == 0
    assert lab.admin.tokens()[0].state == "revoked"
    assert cli("token", "revoke", "feed", *HERE).exit_code == 2
    told = json.loads(cli("token", "create", "--json", *HERE).stdout)
    assert told["token"].startswith("sc1.")
    assert told["expires_at_s"] == 86_400


@pytest.mark.parametrize(("uses", "machines"), [((), 8), (("--uses", "3"), 3), (("--uses", "any"), None)])
def test_tokens_are_for_few_machines(cli: Cli, lab: Lab, uses: tuple[str, ...], machines: int | None) -> None:
    made = cli("token", "create", *uses, *HERE)
    (kept,) = lab.admin.tokens()
    assert kept.max_uses == machines
    assert f"good for 1 d and {machines or 'any number of'} machines" in made.stderr
    for wrong in ("0", "-1", "many", "9" * 30):
        assert cli("token", "create", "--uses", wrong, *HERE).exit_code == 2


def test_a_pairing_code_is_written_alone(cli: Cli, lab: Lab) -> None:
    made = cli("pair", *HERE)
    assert made.stdout == f"{lab.cluster.access.pairing.begin().shown}\n"
    assert "run shardcompute join" in made.stderr
    told = json.loads(cli("pair", "--json", *HERE).stdout)
    assert (told["code"], told["join_port"]) == (lab.cluster.access.pairing.begin().shown, 7421)


def test_throwing_a_machine_out_names_the_tokens_that_go_with_it(cli: Cli, lab: Lab) -> None:
    token = parse_token(lab.cluster.access.create_token())
    lab.cluster.access._tokens, _ = lab.cluster.access._tokens.use(
        token.token_id, token.secret, node_id="b", role=Role.WORKER, now_s=0.0
    )
    done = cli("revoke", "B", *HERE)
    assert done.exit_code == 0
    assert lab.cluster.revoked == ["b"]
    assert "B (b) is thrown out" in done.stderr
    assert f"nobody joins with token {token.token_id} any more" in done.stderr
    assert cli("revoke", "nobody", *HERE).exit_code == 2


def test_keys_are_made_for_a_role_within_limits(cli: Cli, lab: Lab) -> None:
    limits = (
        "--models",
        "org/a",
        "--models",
        "org/b",
        "--requests-per-minute",
        "6",
        "--tokens-per-day",
        "900",
    )
    made = cli("key", "create", "laptop", *limits, "--expires", "2d", *HERE)
    assert "of role use for laptop, good for 2 d" in made.stderr
    (kept,) = lab.admin.keys()
    assert (kept.role, kept.models, kept.requests_per_minute) == ("use", ("org/a", "org/b"), 6)
    assert (kept.tokens_per_day, kept.expires_at_s) == (900, NOW_S + 2 * 86_400)
    listed = " ".join(cli("key", "list", *HERE).stdout.split())
    assert "org/a or org/b, 6 requests a minute, 900 tokens a day" in listed
    assert cli("key", "create", "--role", "observe", *HERE).exit_code == 0
    assert lab.admin.keys()[-1].role == "observe"
    assert cli("key", "create", "--role", "operate", "--tokens-per-day", "5", *HERE).exit_code == 2
    assert cli("key", "create", "--role", "king", *HERE).exit_code == 2


def test_the_page_is_signed_in_by_a_link_whose_secret_no_server_logs(cli: Cli, lab: Lab) -> None:
    link = cli("page", *HERE).stdout.strip()
    address, _, code = link.partition("/#/sign-in/")
    assert address == "http://127.0.0.1:8000"
    assert len(code) >= 32
    assert cli("page", *HERE).stdout.strip() != link


def test_keys_are_made_listed_and_revoked(cli: Cli, lab: Lab) -> None:
    assert "there is no key" in cli("key", "list", *HERE).stderr
    made = cli("key", "create", "laptop", *HERE)
    assert made.exit_code == 0
    secret = made.stdout.strip()
    (kept,) = lab.admin.keys()
    found = lab.cluster.access.find_key(secret)
    assert found is not None
    assert found.label == kept.label == "laptop"
    listed = cli("key", "list", *HERE)
    assert listed.stdout.splitlines()[1].split()[:4] == [kept.id, "laptop", "use", "good"]
    assert secret not in listed.output + made.stderr
    assert cli("key", "revoke", kept.id, *HERE).exit_code == 0
    (told,) = json.loads(cli("key", "list", "--json", *HERE).stdout)
    assert (told["id"], told["is_revoked"]) == (kept.id, True)
    assert json.loads(cli("key", "create", "--json", *HERE).stdout)["key"].startswith("sk-")


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (("status",), dict),
        (("nodes",), list),
        (("ps",), list),
        (("plan", "org/tiny", "--weights", "int8"), dict),
        (("token", "list"), list),
        (("key", "list"), list),
    ],
)
def test_listings_are_one_document_each(cli: Cli, lab: Lab, command: tuple[str, ...], kind: type) -> None:
    result = cli(*command, "--json", *HERE)
    assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    assert isinstance(json.loads(result.stdout), kind)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7D", 604_800), (" 2w ", 1_209_600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1h", "1y", "h", "1h30m", "1e3", "٣h" * 20])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


def test_durations_in_words() -> None:
    assert [format_duration(seconds) for seconds in (1.26, 59, 61, 3600, 7000, 7300, 200_000)] == [
        "1.3 s",
        "59.0 s",
        "1 min",
        "1 h",
        "116 min",
        "2 h",
        "2 d",
    ]


# Conversations


def test_chat_talks_to_the_server(cli: Cli, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["hi", "more", "/exit"]
    monkeypatch.setattr("shardcompute.cli.chat.chat.read_terminal_line", lambda prompt: lines.pop(0))
    result = cli("chat", "--system", "Be brief.", "-v", "--temperature", "0.5", "--seed", "7", *HERE)
    assert result.exit_code == 0
    assert result.stdout == "Paris\nParis\n"
    assert server.prompts == [
        "system:Be brief.|user:hi|",
        "system:Be brief.|user:hi|assistant:Paris|user:more|",
    ]
    _, body = server.bodies[1]
    assert (body["model"], body["temperature"], body["seed"]) == ("org/tiny", 0.5, 7)
    assert "answer 5 tokens in 2.00 s" in result.stderr


def test_speculation_is_asked_for_and_told(cli: Cli, server: Server, opened: Opening) -> None:
    server.usage = {"prompt_tokens_details": {"cached_tokens": 6}}
    server.timings |= {"traversals": 2, "drafted_tokens": 3, "accepted_tokens": 2}
    result = cli("run", "-v", "--speculate", "ngram", "hi there", *HERE)
    assert result.exit_code == 0
    assert server.bodies[-1][1]["speculation"] == {"drafter": "ngram"}
    assert "prompt 8 tokens (6 still known)" in result.stderr
    assert "2 traversals · 2 of 3 drafted tokens were right" in result.stderr
    told = json.loads(cli("run", "--json", "hi there", *HERE).stdout)["timings"]
    assert (told["cached_tokens"], told["traversals"], told["drafted_tokens"], told["accepted_tokens"]) == (
        6,
        2,
        3,
        2,
    )
    assert "speculation" not in server.bodies[-1][1]
    assert cli("run", "--speculate", "magic", "hi there", *HERE).exit_code == 2


def test_chat_chooses_among_what_is_served(cli: Cli, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcompute.cli.chat.chat.read_terminal_line", lambda prompt: "/exit")
    assert "org/other" in cli("chat", "org/other", *HERE).stderr
    assert cli("chat", "org/none", *HERE).exit_code == 3
    server.served = []
    assert cli("chat", *HERE).exit_code == 7


def test_run_asks_the_server(cli: Cli, server: Server, opened: Opening) -> None:
    result = cli("run", "Capital of France?", *HERE)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Paris\n", "")
    assert server.prompts == ["user:Capital of France?|"]
    assert cli("run", "--raw", "Once", *HERE).exit_code == 0
    assert server.prompts[1] == "Once"
    told = json.loads(cli("run", "--json", "hi there", *HERE).stdout)
    assert (told["model"], told["text"], told["token_ids"], told["finish"]) == (
        "org/tiny",
        "Paris",
        None,
        "stop",
    )
    assert opened.references == []


def test_run_uses_the_cluster_on_this_machine_if_it_serves_the_model(
    cli: Cli, home: Path, server: Server, opened: Opening, recognised: None
) -> None:
    say_running(home / "cluster")
    assert cli("run", "hi there").stdout == "Paris\n"
    assert cli("run", "org/other", "hi").stdout == "Paris\n"
    assert [body["model"] for path, body in server.bodies if path == "/tokenize"] == ["org/tiny", "org/other"]
    assert opened.references == []
    assert cli("run", "org/none", "hi").exit_code == 0
    for local in (["--local"], ["--weights", "int8"], ["--stages", "2"]):
        assert cli("run", *local, "hi there").exit_code == 0
    assert opened.references == ["org/none", "", "", ""]
    said = cli("run", "-v", "org/none", "hi").stderr
    assert "org/none is not served there; answering in this process" in said


def test_run_does_not_fall_back_from_a_server_that_was_named(
    cli: Cli, server: Server, opened: Opening
) -> None:
    assert cli("run", "org/none", "hi", *HERE).exit_code == 3
    for local in (["--local"], ["--weights", "int8"]):
        assert cli("run", *local, "hi there", *HERE).exit_code == 2
    assert opened.references == []


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        (event({"error": {"message": "no room", "code": "overloaded"}}), 7, "no room"),
        ("", 9, "ended the answer in the middle"),
    ],
)
def test_an_answer_that_breaks_off(
    cli: Cli, server: Server, opened: Opening, ending: str, code: int, message: str
) -> None:
    server.ending = ending
    result = cli("run", "hi there", *HERE)
    assert (result.exit_code, result.stdout) == (code, "Paris")
    assert message in result.stderr


def test_names_of_models_are_found_by_reference(server: Server) -> None:
    with ClusterClient("http://box", transport=httpx.MockTransport(server)) as client:
        assert remote._served_name(client, "org/tiny@main:Q4_K_M") == "org/tiny"
        assert remote._served_name(client, "") == ""
        assert remote._served_name(client, "org/other") == "org/other"
