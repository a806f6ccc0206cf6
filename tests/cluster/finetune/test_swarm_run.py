"""Fine-tuning through a swarm: the bytes of one process, also when workers die amid a run, while it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardcompute.core.errors import CapacityError, UsageError
from shardcompute.core.generation import GenerationRequest
from shardcompute.finetune.data.examples import ExampleSet
from shardcompute.finetune.local import adapted_modules
from shardcompute.finetune.plan import FinetunePlan, LoraShape
from shardcompute.finetune.preparation import PreparedRun
from shardcompute.finetune.training import CurvePoint, RunCadence, Taught, teach
from shardcompute.node.enrolment.join_client import join_cluster
from shardcompute.node.finetuning.crew import RunOrder
from shardcompute.node.finetuning.swarm_run import SwarmTaught, teach_in_swarm
from shardcompute.node.rpc.commands import Peer
from shardcompute.node.rpc.endpoint import Endpoint
from shardcompute.security import Role
from support.finetuning import open_pipeline, open_tiny, random_examples
from support.swarm.lab import LabSwarm, LabWorker, swarm

STEPS = 8
PLAN = FinetunePlan(
    steps=STEPS, batch=4, micro_batches=3, rate=1e-2, longest=32, lora=LoraShape(rank=2, alpha=4.0, dropout=0.1)
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


@pytest.fixture(scope="module")
def lab(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabSwarm]:
    with swarm(tmp_path_factory.mktemp("swarm"), base, layers=(400, 400, 400, 400), stages=1) as lab:
        yield lab


class Teacher:
    """A driver of runs in a lab."""

    def __init__(self, lab: LabSwarm, base: Path, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        credentials, _ = join_cluster(lab.token, folder / "driver", Role.DRIVER)
        self.endpoint = Endpoint(credentials, "tcp://127.0.0.1:0", {}, transports=lab.network.transports)
        self.endpoint.start()
        with open_tiny(base) as checkpoint:
            modules = adapted_modules(checkpoint, PLAN)
        origin = Peer(lab.cluster.node, lab.cluster.url)
        self.order = RunOrder(lab.model, origin, 6, PLAN, modules, PREPARED.mean_tokens)
        self.points: list[CurvePoint] = []
        self.on_step: Callable[[CurvePoint], None] = lambda _: None

    def teach(self, workers: Sequence[LabWorker], order: RunOrder | None = None) -> SwarmTaught:
        return teach_in_swarm(
            self.endpoint.dialler("finetune"),
            lambda: [Peer(each.node, each.url) for each in workers if each in self.lab.workers],
            order or self.order,
            PREPARED,
            self.folder / "resume",
            "run",
            LOOP,
            on_step=self._note,
            pause_s=0.05,
        )

    def _note(self, point: CurvePoint, _seconds: float) -> None:
        self.points.append(point)
        self.on_step(point)

    def close(self) -> None:
        self.endpoint.close()


@pytest.fixture
def teacher(lab: LabSwarm, base: Path, tmp_path: Path) -> Iterator[Teacher]:
    with closing(Teacher(lab, base, tmp_path)) as teacher:
        yield teacher


def check(found: Taught, expected: Taught) -> None:
    assert found.curve == expected.curve
    assert found.learned.keys() == expected.learned.keys()
    for name, values in expected.learned.items():
        np.testing.assert_array_equal(found.learned[name], values, err_msg=name)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_workers_teach_the_bytes_of_one_process(
    count: int, teacher: Teacher, lab: LabSwarm, expected: Taught
) -> None:
    found = teacher.teach(lab.workers[:count])
    check(found.taught, expected)
    assert (found.wire_bytes > 0) == (count > 1)
    assert found.losses == 0


@pytest.mark.parametrize("count", [2, 4])
def test_copies_of_stages_share_the_optimiser(
    count: int, teacher: Teacher, lab: LabSwarm, expected: Taught
) -> None:
    found = teacher.teach(lab.workers[:count], replace(teacher.order, copies=2))
    assert len(found.taught.curve) == len(expected.curve)
    for point, wanted in zip(found.taught.curve, expected.curve, strict=True):
        np.testing.assert_allclose([point.loss, point.norm], [wanted.loss, wanted.norm], rtol=1e-5)
        assert (point.held_out is None) == (wanted.held_out is None)
    for name, values in expected.learned.items():
        np.testing.assert_allclose(found.taught.learned[name], values, atol=2e-4, err_msg=name)
    moments = 2 * 4 * sum(values.size for values in found.taught.learned.values())
    assert sum(found.optimizer_bytes) == moments
    assert max(found.optimizer_bytes) <= moments / count + 64
    assert found.losses == 0


def test_where_it_is_cut_and_what_is_under_way_changes_no_bit(
    teacher: Teacher, lab: LabSwarm, expected: Taught
) -> None:
    order = replace(teacher.order, costs=(1.0,) * 6, head_cost=2.5, ahead=2)
    found = teacher.teach(lab.workers[:2], order)
    check(found.taught, expected)
    assert len(found.idle_shares) == 2
    assert all(0 <= share < 1 for share in found.idle_shares)


def test_the_swarm_answers_meanwhile(teacher: Teacher, lab: LabSwarm, expected: Taught) -> None:
    request = GenerationRequest(prompt=(5, 6, 7), max_tokens=12)
    before = lab.start(request).result()
    found: list[SwarmTaught] = []
    run = threading.Thread(target=lambda: found.append(teacher.teach(lab.workers)))
    run.start()
    lab.wait_until(lambda: len(teacher.points) > 0, "a first step")
    during = lab.start(request).result()
    run.join(60)
    assert [each.id for each in during.tokens] == [each.id for each in before.tokens]
    check(found[0].taught, expected)


def test_packed_activations_and_gradients_teach_nearly_the_same(
    teacher: Teacher, lab: LabSwarm, expected: Taught
) -> None:
    exact = teacher.teach(lab.workers[:2])
    for file in (teacher.folder / "resume").iterdir():
        file.unlink()
    packed = teacher.teach(lab.workers[:2], replace(teacher.order, codec="bf16"))
    assert packed.wire_bytes < 0.6 * exact.wire_bytes
    losses = [[point.loss for point in taught.curve] for taught in (packed.taught, expected)]
    np.testing.assert_allclose(*losses, rtol=0.05)
    assert losses[0] != losses[1]


def test_a_worker_without_room_says_so_before_the_first_step(
    teacher: Teacher, lab: LabSwarm, base: Path
) -> None:
    plan = replace(PLAN, longest=1 << 20)
    with pytest.raises(CapacityError, match=r"teaching layers 0 to 6 needs .* are left"):
        teacher.teach(lab.workers[:1], replace(teacher.order, plan=plan))
    assert not teacher.points


def test_workers_cannot_open_runs_on_others(teacher: Teacher, lab: LabSwarm) -> None:
    with pytest.raises(UsageError, match="workers do not open runs"):
        teach_in_swarm(
            lab.workers[1]._endpoint.dialler("finetune"),
            lambda: [Peer(lab.workers[0].node, lab.workers[0].url)],
            teacher.order,
            PREPARED,
            teacher.folder / "resume",
            "run",
            LOOP,
            pause_s=0.05,
        )


def test_a_run_goes_on_without_a_worker_that_died(base: Path, tmp_path: Path, expected: Taught) -> None:
    with (
        swarm(tmp_path / "swarm", base, layers=(400, 400, 400), stages=1) as lab,
        closing(Teacher(lab, base, tmp_path)) as teacher,
    ):
        victim = next(each for each in lab.workers if each.node != lab.chain().stages[0].node)

        def kill(point: CurvePoint) -> None:
            if point.step == 5 and victim in lab.workers:
                lab.kill(victim)

        teacher.on_step = kill
        found = teacher.teach(list(lab.workers))
        check(found.taught, expected)
        assert found.losses >= 1
        assert [point.step for point in teacher.points].count(5) == 2, (
            "it goes on from the checkpoint of step 4"
        )
