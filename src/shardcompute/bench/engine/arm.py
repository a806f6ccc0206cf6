"""One arm of a benchmark: an engine in a process of its own that measures what it is told to.

Commands come as JSON lines on standard input, answers go out as JSON lines. Arms run in turns, so that whatever
else the machine does meets all of them alike; each has its own process, so that threads and memory are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil

from shardcompute.bench.engine.stopwatch import Spent, Stopwatch

if TYPE_CHECKING:
    from shardcompute.backends.executor import PickingExecutor

_MIB = 2**20


class Engine(Protocol):
    """What an arm can be asked for."""

    def prefill(self, tokens: int, *, wants_all: bool = False) -> Spent:
        """`wants_all`: the logits of every row, not of the last alone. Then no engine can leave rows out of its last
        layer, which of a model of few layers would be much of the work."""

    def decode(self, batch: int, past: int, steps: int, picks: bool = True) -> Spent: ...


class OurEngine:
    def __init__(
        self,
        path: str,
        form: str,
        backend: str,
        threads: int,
        *,
        device: str = "cpu",
        context: int = 2048,
        kv_tokens: int = 0,
    ) -> None:
        from shardcompute.backends.executor import ExecutorOptions, rows_of_step
        from shardcompute.core.settings import load_settings
        from shardcompute.runtime.shard import open_shard
        from shardcompute.weights.checkpoint import open_checkpoint
        from shardcompute.weights.sources.reference import parse_reference
        from shardcompute.weights.sources.resolve import resolve

        with open_checkpoint(resolve(parse_reference(path), load_settings())) as checkpoint:
            spec = checkpoint.spec
            token_bytes = spec.kv_bytes_per_token_and_layer() * spec.layer_count
            max_rows, max_logit_rows = rows_of_step(backend, device)
            options = ExecutorOptions(
                max_rows=max_rows,
                max_logit_rows=max_logit_rows,
                kv_bytes=kv_tokens * token_bytes or 2 << 30,
                context_length=context,
                threads=threads,
                device=device,
            )
            self._max_rows, self._max_logit_rows = options.max_rows, options.max_logit_rows
            self._vocab_size = spec.vocab_size
            self._executor = open_shard(checkpoint, backend=backend, form=form, options=options)

    def prefill(self, tokens: int, *, wants_all: bool = False) -> Spent:
        watch = Stopwatch()
        self._fill(0, tokens, wants_all=wants_all)
        spent = watch.read()
        self._executor.close_session(0)
        return spent

    def _fill(self, session: int, tokens: int, *, wants_all: bool = False) -> None:
        from shardcompute.core.batch import Segment

        ids = _tokens(tokens) % self._vocab_size
        most = min(self._max_rows, self._max_logit_rows) if wants_all else self._max_rows
        for start in range(0, tokens, most):
            count = min(most, tokens - start)
            segment = Segment(session, start, count, count if wants_all else 1)
            self._executor.step([segment], ids[start : start + count])

    def decode(self, batch: int, past: int, steps: int, picks: bool = True) -> Spent:
        """`picks`: each step goes on from the likeliest tokens, which somebody has to find."""
        from shardcompute.backends.executor import PickingExecutor
        from shardcompute.core.batch import Segment

        for session in range(batch):
            self._fill(session, past)
        if not picks and isinstance(self._executor, PickingExecutor) and self._executor.can_pick:
            spent = self._pick_on_device(self._executor, batch, past, steps)
            self._close(batch)
            return spent
        ids = np.full(batch, 42, dtype=np.int64)
        watch = Stopwatch()
        for step in range(steps):
            logits = self._executor.step([Segment(s, past + step, 1, 1) for s in range(batch)], ids)
            if picks:
                ids = logits.argmax(axis=-1)
        spent = watch.read()
        self._close(batch)
        return spent

    def _close(self, batch: int) -> None:
        for session in range(batch):
            self._executor.close_session(session)

    def _pick_on_device(self, executor: PickingExecutor, batch: int, past: int, steps: int) -> Spent:
        """The best that the engine can do: each step goes on from what the device picked, one ahead of the host."""
        from shardcompute.backends.executor import PickRule
        from shardcompute.core.batch import Segment
        from shardcompute.core.steps import PICKED

        rules, ids = [PickRule()] * batch, np.full(batch, 42, dtype=np.int64)
        watch = Stopwatch()
        ahead = None
        for step in range(steps):
            segments = [Segment(session, past + step, 1, 1) for session in range(batch)]
            launched = executor.launch_picks(segments, ids, rules)
            if ahead is not None:
                ahead.wait()
            ahead, ids = launched, np.full(batch, PICKED, dtype=np.int64)
        if ahead is not None:
            ahead.wait()
        return watch.read()


class TransformersEngine:
    def __init__(self, path: str, threads: int) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch: Any = torch
        folder, file = os.path.split(path)
        if file.endswith(".json"):
            # A shape: the library's own random weights.
            with open(path, encoding="utf-8") as config:
                self._model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.load(config)))
        else:
            is_gguf = file.endswith(".gguf")
            options: dict[str, Any] = {"gguf_file": file} if is_gguf else {"use_safetensors": True}
            source = folder if is_gguf else path
            self._model = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, trust_remote_code=False, **options
            )
        self._model.eval().requires_grad_(False)
        self._vocab_size = self._model.config.vocab_size

    def prefill(self, tokens: int, *, wants_all: bool = False) -> Spent:
        ids = self._torch.tensor(_tokens(tokens)[None] % self._vocab_size)
        watch = Stopwatch()
        self._model(ids, use_cache=True, logits_to_keep=tokens if wants_all else 1)
        return watch.read()

    def decode(self, batch: int, past: int, steps: int, picks: bool = True) -> Spent:
        ids = self._torch.tensor(np.repeat(_tokens(past)[None] % self._vocab_size, batch, axis=0))
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        watch = Stopwatch()
        for _ in range(steps):
            out = self._model(ids, past_key_values=cache, use_cache=True)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
        return watch.read()


def _tokens(count: int) -> Any:
    return np.random.default_rng(7).integers(100, 40_000, count)


def _peak_bytes() -> int:
    """The most that this process has ever been resident with, also while it loaded."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    else:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _answer(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    operations: dict[str, Callable[[], Spent | float]] = {
        "prefill": lambda: engine.prefill(command["tokens"], wants_all=command.get("wants_all", False)),
        "decode": lambda: engine.decode(
            command["batch"], command["past"], command["steps"], command.get("picks", True)
        ),
        "memory": lambda: psutil.Process().memory_info().rss / _MIB,
        "peak_memory": lambda: _peak_bytes() / _MIB,
    }
    answer = operations[command["operation"]]()
    if isinstance(answer, Spent):
        return {"value": answer.clock_s, "processor": answer.processor_s}
    return {"value": answer}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("ours", "transformers", "llama.cpp"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--form", default="native")
    parser.add_argument("--backend", default="onnx")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--kv-tokens", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=16)
    arguments = parser.parse_args()
    engine: Engine
    if arguments.engine == "ours":
        engine = OurEngine(
            arguments.model,
            arguments.form,
            arguments.backend,
            arguments.threads,
            device=arguments.device,
            context=arguments.context,
            kv_tokens=arguments.kv_tokens,
        )
    elif arguments.engine == "llama.cpp":
        from shardcompute.bench.engine.plain_llamacpp import PlainLlamaEngine

        engine = PlainLlamaEngine(arguments.model, arguments.threads, arguments.sessions, arguments.context)
    else:
        engine = TransformersEngine(arguments.model, arguments.threads)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
