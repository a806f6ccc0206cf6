"""What computes a model on CPUs is chosen when it is loaded, for all of them, and kept whoever goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardcompute.backends.cpu_choice import CpuBackendChoice, CpuSpeed
from shardcompute.backends.devices import host_device
from shardcompute.backends.llamacpp.library import installed_version
from shardcompute.core.settings import load_settings
from shardcompute.node.admin.admin import ClusterAdmin
from shardcompute.node.admin.dry_run import plan_model
from shardcompute.node.worker.backend_trial import TriedSpeeds, choose_cpu_backend
from shardcompute.weights.checkpoint import Checkpoint
from support.models.requests import greedy, mixture, prompts
from support.models.tiny_gguf import save_tiny_text_gguf
from support.swarm.lab import Alone, open_alone, swarm

pytestmark = pytest.mark.skipif(installed_version() is None, reason="xllamacpp is not installed")

SLOW, FAST = CpuSpeed(0.02, 0.08, 0.003), CpuSpeed(0.01, 0.05, 0.002)
Choose = Callable[[Checkpoint, str], CpuBackendChoice]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_text_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def by_llamacpp(model: Path) -> Iterator[Alone]:
    with open_alone(model, "llamacpp") as service:
        yield Alone(service)


@pytest.fixture(scope="module")
def by_onnx(model: Path) -> Iterator[Alone]:
    with open_alone(model, "onnx") as service:
        yield Alone(service)


def measured(home: Path, onnx: CpuSpeed, llamacpp: CpuSpeed) -> Choose:
    """The choice that follows from these measurements."""
    settings = replace(load_settings(), data_dir=home, cpu_backend="auto")
    speeds = {"onnx": onnx, "llamacpp": llamacpp}

    def choose(checkpoint: Checkpoint, form: str) -> CpuBackendChoice:
        return choose_cpu_backend(
            checkpoint,
            form,
            settings=settings,
            device=host_device(),
            threads=1,
            trial=lambda opened, threads: TriedSpeeds(speeds),
        )

    return choose


def test_llamacpp_is_chosen_by_itself_and_kept_for_whoever_goes_on(
    tmp_path: Path, model: Path, by_llamacpp: Alone
) -> None:
    choose = measured(tmp_path, SLOW, FAST)
    with swarm(
        tmp_path, model, layers=(3, 3, 3), stages=2, standbys=1, backend="auto", choose_backend=choose
    ) as lab:
        served = lab.state.models[lab.model].model
        assert (served.backend, "one stream 2.00" in served.backend_reason) == ("llamacpp", True)
        plan = plan_model(lab.state, served, 1, 0.0)
        assert "computed by llamacpp on CPUs: llama.cpp is" in plan.text
        assert "one exactness class (llamacpp-" in plan.text
        with ClusterAdmin(lab.cluster, load_settings()) as admin:
            assert "computed by llamacpp on CPUs" in admin.plan(str(model)).text
        late = lab.add_worker(6, backend="onnx")
        talks = [lab.start(request) for request in mixture(by_llamacpp, 4, 100)]
        lab.wait_until(lambda: all(len(talk.tokens) >= 5 for talk in talks), "tokens of all streams")
        lab.kill(lab.stage(0))
        for talk in talks:
            assert talk.result() == by_llamacpp.answer(talk.request)
        # The one that cannot compute it in this class has room for all of it, and is left alone.
        assert not late.loads
        lab.wait_quiet()


def test_the_choice_outlives_a_restart_though_measurements_change(
    tmp_path: Path, model: Path, by_llamacpp: Alone
) -> None:
    request = greedy(prompts(by_llamacpp.service.tokenizer)[0])
    choose = measured(tmp_path, SLOW, FAST)
    with swarm(tmp_path, model, layers=(6,), stages=1, backend="auto", choose_backend=choose) as lab:
        assert lab.start(request).result() == by_llamacpp.answer(request)
        lab.kill_cluster()
        lab.options = replace(lab.options, choose_backend=lambda *_: CpuBackendChoice("onnx", "slower now"))
        lab.open_cluster()
        lab.serve()
        lab.wait_serving(stages=1)
        assert lab.state.models[lab.model].model.backend == "llamacpp"
        assert lab.start(request).result() == by_llamacpp.answer(request)


@pytest.mark.parametrize("why", ["it is slower", "a machine cannot"])
def test_onnx_runtime_stays(tmp_path: Path, model: Path, by_onnx: Alone, why: str) -> None:
    is_slower = why == "it is slower"
    choose = measured(tmp_path, FAST, SLOW) if is_slower else measured(tmp_path, SLOW, FAST)
    backend = "auto" if is_slower else "onnx"
    # Where any may be chosen, rooms are made for llama.cpp, whose layers take less.
    layers = (4, 4) if is_slower else (3, 3)
    with swarm(tmp_path, model, layers=layers, stages=2, backend=backend, choose_backend=choose) as lab:
        served = lab.state.models[lab.model].model
        assert served.backend == "onnx"
        assert (
            "not chosen" if is_slower else "worker-1, worker-2 cannot run llama.cpp"
        ) in served.backend_reason
        for text in prompts(by_onnx.service.tokenizer)[:3]:
            assert lab.start(greedy(text)).result() == by_onnx.answer(greedy(text))
