"""What `bench faults` makes of its answers, and how faults come about while somebody asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from shardcompute.bench.wan.cluster import TimedAnswer, WanCluster, WanServing
from shardcompute.bench.wan.faults import FAULTS, Fault, FaultBench, FaultRow, ask_amid, await_serving
from shardcompute.bench.wan.faults_report import differing, raw_results, summarise
from shardcompute.cli.main import build_app
from shardcompute.core.errors import BackendError, UsageError


def row(fault: str = "loss", **changes: Any) -> FaultRow:
    values: dict[str, Any] = {
        "fault": fault,
        "round": 1,
        "stream": 1,
        "stage": "stage-1",
        "tokens": 64,
        "undisturbed_s": 4.0,
        "disturbed_s": 8.0,
        "undisturbed_pause_s": 0.1,
        "disturbed_pause_s": 2.5,
        "pings": 0,
        "epochs": 0,
        "whole_again_s": 0.0,
        "text": "yes",
        "expected": "yes",
    }
    return FaultRow(**{**values, **changes})


def figures(rows: Sequence[FaultRow], fault: str) -> dict[str, float]:
    return {each.metric: each.value for each in summarise(rows) if each.labels["fault"] == fault}


def test_medians_of_answers_and_the_worst_pause() -> None:
    rows = [
        row(),
        row(round=2, disturbed_s=5.0, disturbed_pause_s=0.5, pings=3),
        row(round=3, disturbed_s=16.0, disturbed_pause_s=3.5, text="no"),
        row("jitter", disturbed_s=4.0, whole_again_s=1.5),
    ]
    assert [each.labels["fault"] for each in summarise(rows) if each.metric == "pings"] == ["loss", "jitter"]
    loss = figures(rows, "loss")
    assert loss["tokens_per_s"] == pytest.approx(8.0)
    assert loss["speed"] == pytest.approx(0.5)
    assert (loss["longest_pause"], loss["usual_pause"]) == (3.5, 0.1)
    assert loss["pings"] == pytest.approx(1.0)
    assert loss["same_text"] == pytest.approx(2 / 3)
    jitter = figures(rows, "jitter")
    assert (jitter["speed"], jitter["whole_again"], jitter["same_text"]) == (1.0, 1.5, 1.0)
    assert differing(rows) == [rows[2]]


def test_epochs_count_once_for_answers_of_the_same_time() -> None:
    rows = [row(stream=stream, round=number, epochs=number) for number in (1, 2) for stream in (1, 2, 3)]
    assert figures(rows, "loss")["epochs"] == 1.5


def test_raw_results_tell_every_answer() -> None:
    raw = [each.as_json() for each in raw_results([row(), row("jitter", round=2, stage="stage-3")])]
    assert {(each["fault"], each["round"], each["stage"]) for each in raw} == {
        ("loss", 1, "stage-1"),
        ("jitter", 2, "stage-3"),
    }
    assert {"metric": "answer", "value": 8.0, "unit": "s"}.items() <= raw[0].items()


@pytest.mark.parametrize("changes", [{"faults": ("loss", "plague")}, {"faults": ()}, {"streams": 0}])
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        FaultBench(WanServing("m"), **changes)


class Server:
    """Answers in ten pieces, and notes what else happens."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.happened: list[str] = []
        self.began = cast(Callable[[], None], lambda: None)
        self._problem = problem

    def ask_all(
        self, bodies: Sequence[Mapping[str, Any]], *, on_piece: Callable[[int], None]
    ) -> tuple[list[TimedAnswer], float]:
        for count in range(1, 11):
            self.happened.append(f"piece {count}")
            on_piece(count)
            if count == 4:
                self.began()
        if self._problem is not None:
            raise self._problem
        return [TimedAnswer(text="yes") for _ in bodies], 1.0

    def fault(self, *, is_sudden: bool) -> Fault:
        @contextmanager
        def befall(cluster: object, stage: str) -> Iterator[None]:
            self.happened.append(f"{stage} is hit")
            yield
            self.happened.append("it is over")

        return Fault("", befall, is_sudden)


def ask(server: Server, fault: Fault, after_pieces: int = 4) -> list[TimedAnswer]:
    return ask_amid(cast(WanCluster, server), [{}, {}], fault, "stage-2", after_pieces=after_pieces)


def test_a_lasting_fault_is_there_before_the_question() -> None:
    server = Server()
    assert len(ask(server, server.fault(is_sudden=False))) == 2
    assert server.happened[:2] == ["stage-2 is hit", "piece 1"]
    assert server.happened[-1] == "it is over"


def test_a_sudden_fault_comes_amid_the_answer() -> None:
    server = Server()

    def wait_for_it() -> None:
        while "stage-2 is hit" not in server.happened:
            pass

    server.began = wait_for_it
    ask(server, server.fault(is_sudden=True))
    assert server.happened.index("stage-2 is hit") > server.happened.index("piece 4")
    assert server.happened[-1] == "it is over"


def test_a_fault_that_comes_too_late_does_not_come() -> None:
    server = Server()
    ask(server, server.fault(is_sudden=True), after_pieces=99)
    assert server.happened == [f"piece {count}" for count in range(1, 11)]


def test_a_fault_is_over_also_where_the_answer_fails() -> None:
    server = Server(BackendError("the stream failed"))
    with pytest.raises(BackendError, match="the stream failed"):
        ask(server, server.fault(is_sudden=False))
    assert server.happened[-1] == "it is over"


def test_a_fault_that_cannot_be_brought_about_is_told() -> None:
    def fail(cluster: object, stage: str) -> Any:
        raise ProcessLookupError(stage)

    with pytest.raises(BackendError, match="stage-2"):
        ask(Server(), Fault("", fail))


def test_a_cluster_that_stays_broken_is_told() -> None:
    class Broken:
        def stage_machines(self) -> list[str]:
            return []

        def state(self) -> dict[str, Any]:
            return {"chains": ["a sad one"]}

    with pytest.raises(BackendError, match="a sad one"):
        await_serving(cast(WanCluster, Broken()), most_s=0.0)


def test_the_command_shows_figures_and_complains_of_texts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [row(), row("blackout", epochs=1, text="no")]
    asked: list[FaultBench] = []

    def run(bench: FaultBench, say: object) -> list[FaultRow]:
        asked.append(bench)
        return rows

    monkeypatch.setattr("shardcompute.bench.wan.faults.run_fault_bench", run)
    monkeypatch.setattr("shardcompute.cli.bench.faults.model_path", lambda model: model)
    out = tmp_path / "faults.json"
    command = ["bench", "faults", "--faults", "loss,blackout", "--streams", "2", "--json", str(out)]
    done = CliRunner().invoke(build_app(), command)
    assert done.exit_code == 1
    assert "blackout" in done.stdout
    assert "1 of 2 answers DIFFER" in done.stderr
    assert (asked[0].faults, asked[0].streams) == (["loss", "blackout"], 2)
    written = json.loads(out.read_text())["results"]
    assert {"metric": "epochs", "value": 1, "unit": "a round", "fault": "blackout"} in written


def test_every_fault_has_a_line_in_the_list() -> None:
    done = CliRunner().invoke(build_app(), ["bench", "faults", "--list"])
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(FAULTS)
