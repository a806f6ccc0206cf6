"""The torch executor against the numpy oracle, on random networks with every feature a family may have.

The same checks run on a CUDA device where there is one: there with float32 for closeness, and with bfloat16 for
what must be equal bit by bit (graphs or not, cut or whole, one row or many).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.core.batch import Segment
from shardcompute.core.generation import Sampling
from shardcompute.core.steps import PICKED
from shardcompute.decoding import TokenHistory, choose_token
from shardcompute.decoding.pick_rules import pick_rule
from shardcompute.models.decoder import Decoder
from shardcompute.models.spec import ModelSpec, Stage, cut, whole
from support.models.random_networks import (
    CONTEXT,
    DENSE,
    FORMS,
    KV_BYTES,
    SPECS,
    VOCABULARY,
    RandomSource,
    assert_close,
    ids_of,
    make_spec,
    oracle,
    run_all,
    run_chain,
)

torch = pytest.importorskip("torch")
from shardcompute.backends.torch import TorchExecutor  # noqa: E402


def make(
    spec: ModelSpec, stage: Stage | None = None, form: str = "dense", device: str = "cpu", **options: Any
) -> TorchExecutor:
    chosen = ExecutorOptions(kv_bytes=KV_BYTES, context_length=CONTEXT, device=device, **options)
    return TorchExecutor(Decoder(spec, stage or whole(spec), RandomSource(spec, form)), chosen)


@pytest.mark.parametrize("name", SPECS)
def test_every_feature_as_the_oracle_computes_it(name: str) -> None:
    assert_close(run_all(make(SPECS[name])), run_all(oracle(SPECS[name])), 2e-4)


@pytest.mark.parametrize("form", FORMS)
def test_quantised_weights_as_the_oracle_computes_them(form: str) -> None:
    spec = make_spec(has_qkv_bias=True)
    assert_close(run_all(make(spec, form=form)), run_all(oracle(spec, form)), 2e-4)


@pytest.mark.parametrize("name", ["plain", "gemma", "sinks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cut_model_computes_the_same_bits(name: str, dtype: str) -> None:
    spec = SPECS[name]
    stages = [make(spec, stage, dtype=dtype) for stage in cut(spec, spec.layer_count)]
    for a, b in zip(run_chain(stages), run_all(make(spec, dtype=dtype)), strict=True):
        np.testing.assert_array_equal(a, b)


def continue_and_compare(spec: ModelSpec, device: str, **options: Any) -> None:
    """Some steps planned at once say and compute what they do one by one, across the end of a page."""
    segments = [Segment(1, 0, 61, 1), Segment(2, 0, 5, 1)]

    def read(executor: TorchExecutor) -> Any:
        return executor.step_tensor(segments, torch.from_numpy(ids_of(segments)).long().to(device)).argmax(-1)

    starts = [(segment.session, segment.stop) for segment in segments]
    planned, said, states = make(spec, device=device, **options), list[Any](), list[Any]()
    ids = read(planned)

    def choose(logits: Any, final: Any) -> Any:
        states.append(final.float().cpu())
        said.append(logits.argmax(-1))
        return said[-1]

    planned.continue_tensor(starts, ids, 6, choose)
    stepped = make(spec, device=device, **options)
    ids = read(stepped)
    for step in range(6):
        rows = [Segment(session, start + step, 1, 1) for session, start in starts]
        ids = stepped.step_tensor(rows, ids, keeps_hidden=True).argmax(-1)
        assert ids.tolist() == said[step].tolist()
        assert torch.equal(stepped.final_tensor().cpu(), states[step])
    assert [planned.session_length(session) for session in (1, 2)] == [67, 11]


@pytest.mark.parametrize("name", ["plain", "gemma"])
def test_steps_that_are_planned_at_once_are_the_same_steps(name: str) -> None:
    continue_and_compare(SPECS[name], "cpu")


def test_bfloat16_stays_near_the_oracle() -> None:
    assert_close(run_all(make(SPECS["plain"], dtype="bfloat16")), run_all(oracle(SPECS["plain"])), 0.1)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["plain", "latent"])
def test_cuda_steps_that_are_planned_at_once_are_the_same_steps(name: str) -> None:
    continue_and_compare(SPECS[name], "cuda", dtype="bfloat16", use_graphs=False)


@needs_cuda
@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_cuda_as_the_oracle_computes_it(name: str, use_graphs: bool) -> None:
    ours = make(SPECS[name], device="cuda", dtype="float32", use_graphs=use_graphs)
    assert_close(run_all(ours), run_all(oracle(SPECS[name])), 2e-4)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", DENSE)  # rounding may send a row to another expert
def test_cuda_bfloat16_stays_near_the_oracle(name: str) -> None:
    ours = run_all(make(SPECS[name], device="cuda", dtype="bfloat16"))
    for a, b in zip(ours, run_all(oracle(SPECS[name])), strict=True):
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("form", FORMS)
def test_cuda_quantised_stays_near_the_oracle(form: str) -> None:
    spec = make_spec(has_qkv_bias=True)
    ours = run_all(make(spec, form=form, device="cuda", dtype="bfloat16"))
    for a, b in zip(ours, run_all(oracle(spec, form)), strict=True):
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", DENSE)
def test_graphs_change_no_bit(name: str) -> None:
    plain = run_all(make(SPECS[name], device="cuda", use_graphs=False))
    for a, b in zip(run_all(make(SPECS[name], device="cuda", use_graphs=True)), plain, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["plain", "gemma", "sinks"])
def test_a_cut_model_computes_the_same_bits_on_cuda(name: str) -> None:
    spec = SPECS[name]
    stages = [make(spec, stage, device="cuda") for stage in cut(spec, spec.layer_count)]
    for a, b in zip(run_chain(stages), run_all(make(spec, device="cuda")), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@needs_cuda
def test_rows_do_not_depend_on_their_batch() -> None:
    spec = dataclasses.replace(SPECS["head-norm"], hidden=256, intermediate=512)
    together, alone = make(spec, device="cuda"), make(spec, device="cuda")
    prompts = [Segment(session, 0, 150 + session, 1) for session in range(10)]
    for prompt in prompts:
        run_all(together, [[prompt]])
        run_all(alone, [[prompt]])
    nexts = [Segment(p.session, p.stop, 1, 1) for p in prompts]
    joint = run_all(together, [nexts])[0]
    single = np.concatenate(run_all(alone, [[segment] for segment in nexts]))
    np.testing.assert_array_equal(joint, single)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("form", ["dense", "int8", "int4-shift", "int4-shift-mixed"])
@pytest.mark.parametrize("name", ["head-norm", "gemma", "sinks"])
def test_a_prompt_has_the_same_bits_in_any_pieces(name: str, form: str) -> None:
    """Alone, token by token, in pieces that touch any part of a page, and beside other prompts of any length."""
    spec = dataclasses.replace(SPECS[name], hidden=256, intermediate=512, context_length=1024)
    if spec.experts is not None:  # of whole blocks
        spec = dataclasses.replace(spec, experts=dataclasses.replace(spec.experts, intermediate=64))
    options = ExecutorOptions(kv_bytes=1 << 26, max_rows=2048, context_length=1024, device="cuda")
    executor = TorchExecutor(Decoder(spec, whole(spec), RandomSource(spec, form)), options)
    length, ids = 700, ids_of([Segment(1, 0, 700, 1)])
    whole_prompt = executor.step([Segment(1, 0, length, 1)], ids)
    for pieces in (
        [65] * 10 + [50],
        [1, 699],
        [63, 66, 571],
        [257, 443],
        [40] * 17 + [20],
        [512] + [1] * 188,
    ):
        start = 0
        for count in pieces:
            last = executor.step([Segment(2, start, count, 1)], ids[start : start + count])
            start += count
        np.testing.assert_array_equal(last, whole_prompt)
        executor.close_session(2)
    for count in (3, 30, 129, 600, 1023):
        other, mine = Segment(3, 0, count, 1), Segment(2, 0, length, 1)
        behind = executor.step([other, mine], np.concatenate([ids_of([other]), ids]))
        np.testing.assert_array_equal(behind[1:], whole_prompt)
        before = executor.step([mine, other], np.concatenate([ids, ids_of([other])]))
        np.testing.assert_array_equal(before[:1], whole_prompt)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("name", ["sinks", "sparse", "grouped", "weighed-input"])
def test_rows_of_sparse_models_do_not_depend_on_their_batch(name: str, use_graphs: bool) -> None:
    together, alone = (make(SPECS[name], device="cuda", use_graphs=use_graphs) for _ in range(2))
    prompts = [Segment(session, 0, 20 + session, 1) for session in range(10)]
    joint = run_all(together, [prompts])[0]
    single = np.concatenate(run_all(alone, [[prompt] for prompt in prompts]))
    np.testing.assert_array_equal(joint, single)
    nexts = [Segment(p.session, p.stop, 1, 1) for p in prompts]
    joint = run_all(together, [nexts])[0]
    single = np.concatenate(run_all(alone, [[segment] for segment in nexts]))
    np.testing.assert_array_equal(joint, single)


@pytest.mark.gpu
@needs_cuda
def test_verifying_a_draft_is_decoding() -> None:
    spec = SPECS["gemma"]
    at_once, by_one = make(spec, device="cuda"), make(spec, device="cuda")
    prompt = Segment(1, 0, 130, 1)
    run_all(at_once, [[prompt]])
    run_all(by_one, [[prompt]])
    verified = run_all(at_once, [[Segment(1, 130, 6, 6)]])[0]
    decoded = np.concatenate(run_all(by_one, [[Segment(1, 130 + i, 1, 1)] for i in range(6)]))
    np.testing.assert_array_equal(verified, decoded)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("use_graphs", [False, True])
def test_a_session_that_begins_with_another_s_memory_on_cuda(is_moved: bool, use_graphs: bool) -> None:
    executor = make(next(iter(SPECS.values())), device="cuda", use_graphs=use_graphs)
    ids = np.arange(100) % VOCABULARY
    for session in (1, 2):
        executor.step([Segment(session, 0, 70, 1)], ids[:70])
    expected = np.array(executor.step([Segment(1, 70, 30, 1)], ids[70:]))
    executor.step([Segment(2, 70, 20, 1)], ids[10:30])
    executor.adopt(2, 3, 70, is_moved=is_moved)
    assert (2 in executor.sessions()) is not is_moved
    assert np.array_equal(executor.step([Segment(3, 70, 30, 1)], ids[70:]), expected)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("rows", [10, 300])
@pytest.mark.parametrize("form", ["dense", "int4"])
def test_a_step_that_wants_no_logits_on_cuda(rows: int, form: str) -> None:
    executor = make(SPECS["plain"], form=form, device="cuda", dtype="bfloat16")
    assert executor.step([Segment(1, 0, rows, 0)], np.arange(rows) % VOCABULARY).shape == (0, VOCABULARY)
    rule = pick_rule(Sampling(), rows + 1)
    executor.launch_picks([Segment(1, 0, rows, 0)], np.arange(rows) % VOCABULARY, []).wait()
    picked = executor.launch_picks([Segment(1, rows, 1, 1)], np.asarray([3]), [rule]).wait()
    assert picked.token(0) is not None


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])], ids=["on CPUs", "on CUDA"]
)
@pytest.mark.parametrize("lengths", [(9,), (70, 5)], ids=["short", "long first"])
def test_hidden_and_final_states(device: str, lengths: tuple[int, ...]) -> None:
    """In the batch's order, also where a device computes short segments first."""
    spec = next(iter(SPECS.values()))
    ours, theirs = make(spec, device=device, dtype="float32"), oracle(spec)
    segments = [Segment(session, 0, length, 3) for session, length in enumerate(lengths)]
    ids = np.arange(sum(lengths)) % VOCABULARY
    for executor in (ours, theirs):
        executor.step(segments, ids, keeps_hidden=True)
    assert_close([ours.hidden_rows()], [theirs.hidden_rows()], 1e-3)
    assert_close([ours.final_rows()], [theirs.final_rows()], 1e-3)
    assert len(ours.final_rows()) == len(ids)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("use_graphs", [False, True])
def test_tokens_picked_on_cuda_are_those_of_its_logits(use_graphs: bool) -> None:
    """Greedy, drawn, and one whose logits come to the host; steps that go on from tokens that never came there."""
    executor = make(SPECS["plain"], device="cuda", use_graphs=use_graphs)
    samplings = [Sampling(), Sampling(temperature=0.9, seed=3), Sampling(temperature=0.7, top_k=9, top_p=0.9)]
    prompts = [Segment(session, 0, 5 + session, 1) for session in range(3)]
    expected = []
    segments, ids = prompts, ids_of(prompts)
    for _ in range(6):
        logits = executor.step(segments, ids)
        chosen = [
            choose_token(row, sampling, TokenHistory(), segment.stop).id
            for row, sampling, segment in zip(logits, samplings, segments, strict=True)
        ]
        expected.append(chosen)
        segments = [Segment(segment.session, segment.stop, 1, 1) for segment in segments]
        ids = np.asarray(chosen)
    segments, ids, pending = prompts, ids_of(prompts), []
    for _ in range(6):
        rules = [
            pick_rule(sampling, segment.stop) for sampling, segment in zip(samplings, segments, strict=True)
        ]
        pending.append(executor.launch_picks(segments, ids, rules))
        segments = [Segment(segment.session, segment.stop, 1, 1) for segment in segments]
        ids = np.full(3, PICKED)
        assert all(executor.can_continue(segment.session, segment.start) for segment in segments)
    assert [[each.wait().token(row) for row in range(3)] for each in pending] == expected
    kept = executor.launch_picks([Segment(9, 0, 4, 1)], np.arange(4), [None]).wait()
    assert kept.token(0) is None
    np.testing.assert_array_equal(kept.logits(0), executor.step([Segment(9, 0, 4, 1)], np.arange(4))[0])
