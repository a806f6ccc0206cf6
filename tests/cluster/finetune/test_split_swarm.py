"""Split learning through a swarm: the bytes of one process, and no token or label on any worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardcompute.cli.models.finetune_swarm import HomeLayers, home_opener
from shardcompute.finetune.data.batches import MicroBatch
from shardcompute.finetune.data.examples import ExampleSet
from shardcompute.finetune.local import LocalOptions, adapted_modules
from shardcompute.finetune.plan import FinetunePlan, LoraShape
from shardcompute.finetune.preparation import PreparedRun
from shardcompute.finetune.swarm.stage_runner import StageRunner
from shardcompute.finetune.training import CurvePoint, RunCadence, Taught, teach
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.node.finetuning.crew import Crew, RunOrder
from shardcompute.node.finetuning.swarm_run import OpenPipeline, SwarmTaught, teach_in_swarm
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.security import Role
from shardcompute.wire import Link
from support.finetuning import open_pipeline, open_tiny, random_examples
from support.swarm.lab import LabSwarm, LabWorker, swarm

PLAN = FinetunePlan(
    steps=5, batch=8, micro_batches=7, rate=1e-2, longest=32, lora=LoraShape(rank=2, alpha=4.0, dropout=0.1)
)  # fmt: skip
LOOP = RunCadence(checkpoint_every=2, evaluate_every=3)
EXAMPLES = random_examples(13)
PREPARED = PreparedRun(PLAN, ExampleSet(tuple(EXAMPLES[:9]), 0, 0), tuple(EXAMPLES[9:]), Path("data"), "")


@pytest.fixture(scope="module")
def expected(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    with open_tiny(base) as checkpoint:
        pipeline = open_pipeline(checkpoint, (0, 6), PLAN)
    folder = tmp_path_factory.mktemp("alone")
    return teach(pipeline, PLAN, PREPARED.taught.examples, folder, "run", LOOP, held_out=PREPARED.held_out)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[MicroBatch]:
    """Whatever workers hear of batches."""
    found: list[MicroBatch] = []
    for name in ("learn", "evaluate"):
        plain = getattr(StageRunner, name)

        def heard(
            self: StageRunner, call: int, batches: Sequence[MicroBatch], plain: object = plain
        ) -> object:
            found.extend(batches)
            return plain(self, call, batches)  # type: ignore[operator]

        monkeypatch.setattr(StageRunner, name, heard)
    return found


class Owner:
    """Whoever has the data: drives a run, and keeps the first and last layers."""

    def __init__(self, lab: LabSwarm, base: Path, folder: Path, kept: int) -> None:
        self.lab, self.base, self.folder, self.kept = lab, base, folder, kept
        credentials, _ = join_cluster(lab.token, folder / "driver", Role.DRIVER)
        self.endpoint = Endpoint(credentials, "tcp://127.0.0.1:0", {}, transports=lab.network.transports)
        self.endpoint.start()
        with open_tiny(base) as checkpoint:
            modules = adapted_modules(checkpoint, PLAN)
        origin = Peer(lab.cluster.node, lab.cluster.url)
        self.order = RunOrder(
            lab.model, origin, 6, PLAN, modules, PREPARED.mean_tokens, kept=kept, owner=self.endpoint.node
        )
        self.points: list[CurvePoint] = []
        self.said: list[str] = []

    def teach(self, workers: Sequence[LabWorker], dies: LabWorker | None = None) -> SwarmTaught:
        def note(point: CurvePoint, _seconds: float) -> None:
            self.points.append(point)
            if point.step == 3 and dies in self.lab.workers and dies is not None:
                self.lab.kill(dies)

        dial = self.endpoint.dialler("finetune")
        return teach_in_swarm(
            dial,
            lambda: [Peer(each.node, each.url) for each in workers if each in self.lab.workers],
            self.order,
            PREPARED,
            self.folder / "resume",
            "run",
            LOOP,
            on_step=note,
            open_pipeline=self._opener(dial),
            pause_s=0.05,
        )

    def _opener(self, dial: Callable[[Peer], Link]) -> OpenPipeline:
        """As the command line opens it, with what it says of others."""
        home = HomeLayers(self.kept, LocalOptions())
        with open_tiny(self.base) as checkpoint:
            return home_opener(checkpoint, PREPARED, home, None, self.order, dial, self.said.append)

    def close(self) -> None:
        self.endpoint.close()


def check(found: Taught, expected: Taught) -> None:
    assert found.curve == expected.curve
    for name, values in expected.learned.items():
        np.testing.assert_array_equal(found.learned[name], values, err_msg=name)


def test_workers_see_neither_tokens_nor_labels_and_teach_the_same_bytes(
    base: Path, tmp_path: Path, expected: Taught, told: list[MicroBatch]
) -> None:
    with swarm(tmp_path / "swarm", base, layers=(400, 400), stages=1) as lab:
        for count, kept in ((1, 2), (2, 1)):
            with closing(Owner(lab, base, tmp_path / f"{count}", kept)) as owner:
                found = owner.teach(lab.workers[:count])
            check(found.taught, expected)
            assert found.wire_bytes > 0
            assert found.losses == 0
            (said,) = owner.said
            assert "Other machines could still read: of" in said
        assert told
        assert not any(batch.ids.any() or batch.targets.any() or batch.total != 1 for batch in told)
        victim = next(each for each in lab.workers if each.node != lab.chain().stages[0].node)
        with closing(Owner(lab, base, tmp_path / "lost", 1)) as owner:
            lost = owner.teach(list(lab.workers), dies=victim)
        check(lost.taught, expected)
        assert lost.losses >= 1


def test_nobody_joins_a_run_from_behind_who_does_not_keep_its_last_layers(base: Path, tmp_path: Path) -> None:
    from shardcompute.core.errors import LinkError
    from shardcompute.finetune.swarm.frames import JOINS_BEHIND, NoFacts, make_frame

    with (
        swarm(tmp_path / "swarm", base, layers=(400, 400), stages=1) as lab,
        closing(Owner(lab, base, tmp_path, 1)) as owner,
    ):
        workers = [Peer(each.node, each.url) for each in lab.workers]
        dial = owner.endpoint.dialler("finetune")
        plain = replace(owner.order, kept=0, owner="")
        with Crew(dial, workers, plain) as crew, dial(workers[1]) as link:
            link.send(*make_frame(crew.name, "join", NoFacts(), number=JOINS_BEHIND))
            with pytest.raises(LinkError):
                link.receive(10)
