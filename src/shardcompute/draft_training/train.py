"""One training run of a draft head: self-play, training rows from it, the training loop, evaluation.

The model talks to itself, reads what it said, and the network learns from the states that it had meanwhile.
`python -m shardcompute.draft_training.train MODEL FILE` does it in a batch job, without what a terminal needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcompute.backends.executor import ExecutorOptions
from shardcompute.backends.matrix import DenseMatrix, Float32, Matrix
from shardcompute.core.batch import PAGE_TOKENS
from shardcompute.core.errors import BackendError, ShardComputeError, UsageError
from shardcompute.draft_training.dialogue import SelfPlayDialogue
from shardcompute.draft_training.scripts import write_scripts
from shardcompute.models.decoder import Decoder
from shardcompute.models.draft_head import (
    DraftHeadBlock,
    DraftHeadWeights,
    decode_draft_head,
    encode_draft_head,
)
from shardcompute.models.spec import Stage, head_stage, whole
from shardcompute.weights.checkpoint import Checkpoint, open_checkpoint
from shardcompute.weights.formats.quantise import convert
from shardcompute.weights.sources.progress import NullProgress, Progress

if TYPE_CHECKING:
    from shardcompute.backends.torch import TorchExecutor
    from shardcompute.draft_training.self_play import SelfPlay
    from shardcompute.draft_training.training_loop import DraftHeadNet, Evaluation, FrozenWeights
    from shardcompute.draft_training.training_rows import TrainingRows

Say = Callable[[str], None]
_TALK_SHARE = 0.4
_FEWEST_TOKENS = 512
_SHORT_TOKENS = 8
_PASSAGE_TOKENS = 384
_PASSAGE_SHARE = 0.25
_REPORT_S = 5.0
_MEMORY_SHARE = 0.35
_HOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How long to talk and to train: `minutes` for both together, or `tokens` of self-play and `epochs` over them.

    Zeros stand for what suits the device (`sessions`, `batch`) or the model (`width`). `LoopOptions` says what `soft`
    is.
    """

    minutes: float | None = 10.0
    tokens: int | None = None
    epochs: float = 4.0
    blocks: int = 2
    width: int = 0
    vocabulary: int = 16_384
    device: str = "auto"
    sessions: int = 0
    batch: int = 0
    soft: float = 0.5
    context_length: int = 512
    threads: int = 1
    seed: int = 1


@dataclass(frozen=True, slots=True)
class TrainedDraftHead:
    """Trained weights, and how they did on conversations that were held out (`Evaluation` says how)."""

    weights: DraftHeadWeights
    agreement: tuple[float, ...]
    acceptance: tuple[float, ...]
    accepted: float
    covered: float
    tokens: int
    loss: float

    def describe(self) -> list[str]:
        """Lines for people."""
        return [
            f"learned from {self.tokens} tokens; loss {self.loss:.3f}; "
            f"{self.covered:.1%} of tokens are among the {len(self.weights.ids)} known ones",
            f"right behind the true text:    {_percents(self.agreement)}",
            f"right behind a right draft:    {_percents(self.acceptance)}",
            f"expected tokens per round: {1 + self.accepted:.2f}, with {len(self.acceptance)} drafted",
        ]


def train_draft_head(
    checkpoint: Checkpoint,
    plan: TrainingOptions,
    *,
    text: str = "",
    progress: Progress | None = None,
    say: Say = lambda _: None,
) -> TrainedDraftHead:
    """Self-play, read, train, evaluate. `progress` shows what is under way, `say` gets figures every few seconds."""
    if importlib.util.find_spec("torch") is None:
        raise BackendError("a draft head is trained with torch", hint="pip install 'shardcompute[torch]'")
    if plan.minutes is None and plan.tokens is None:
        raise UsageError(
            "nothing says how long to train", hint="give a time with --minutes or an amount with --tokens"
        )
    return _TrainingRun(checkpoint, plan, progress or NullProgress(), say).run(text)


class _TrainingRun:
    """One run: what all its parts need to know."""

    def __init__(self, checkpoint: Checkpoint, plan: TrainingOptions, progress: Progress, say: Say) -> None:
        from shardcompute.backends.torch.device import choose_device

        self._started = time.monotonic()
        self._checkpoint = checkpoint
        self._spec = checkpoint.spec
        self._plan = plan
        self._progress = progress
        self._say = say
        self._device: Any = choose_device(_choose_device_name(plan.device))
        is_cuda = self._device.type == "cuda"
        self._sessions = plan.sessions or (self._most_sessions() if is_cuda else 16)
        self._batch = plan.batch or (4096 if is_cuda else 128)
        self._context_length = min(plan.context_length, self._spec.context_length)
        self._read_rows = max(8192 if is_cuda else 512, self._context_length)

    def run(self, text: str) -> TrainedDraftHead:
        from shardcompute.draft_training.training_loop import evaluate

        dataset = self._collect(text)
        if dataset.rows < _FEWEST_TOKENS:
            raise UsageError(
                f"the model said {dataset.rows} tokens, too few to learn from (at least {_FEWEST_TOKENS})",
                hint="give it longer with --minutes or --tokens",
            )
        ids = self._choose_vocabulary(dataset)
        frozen = self._frozen_weights(ids)
        net, loss = self._train(dataset, frozen)
        # What was kept is evaluated, with all its rounding.
        weights = decode_draft_head(encode_draft_head(_pack(net, ids)), self._spec.hidden)
        result = self._evaluate(evaluate, weights, dataset, frozen)
        trained = TrainedDraftHead(
            weights,
            result.agreement,
            result.acceptance,
            result.accepted,
            result.covered,
            dataset.rows,
            loss,
        )
        for line in trained.describe():
            self._say(line)
        return trained

    def _collect(self, text: str) -> TrainingRows:
        """The training rows: have the model talk to itself and read."""
        import torch

        from shardcompute.draft_training.self_play import SelfPlay
        from shardcompute.draft_training.training_rows import TrainingRows

        self._progress.start(f"{self._checkpoint.name} talks to itself", None)
        try:
            executor = self._open_model()
            head = None
            if self._device.type == "cuda":
                torch.set_float32_matmul_precision(
                    "high"
                )  # enough for states in 16 bit, and eight times as fast
                head = self._load("head")
            dataset = TrainingRows(self._capacity(), self._spec.hidden, self._device, head=head)
            tokenizer = self._checkpoint.tokenizer()
            if text:
                dataset.read(executor, self._passages(tokenizer.encode(text), dataset), self._read_rows)
            play = SelfPlay(
                executor,
                write_scripts(tokenizer, self._context_length, self._plan.seed),
                sessions=self._sessions,
                context_length=self._context_length,
                max_rows=max(self._read_rows, 2 * self._sessions),
                device=self._device,
                seed=self._plan.seed,
            )
            self._play(play, executor, dataset)
            executor.close()
            return dataset
        finally:
            self._progress.finish()

    def _play(self, play: SelfPlay, executor: TorchExecutor, dataset: TrainingRows) -> None:
        """Until there is enough: let the model talk, and read what it said as soon as that fills a step."""
        heard: list[SelfPlayDialogue] = []
        waiting, started = 0, time.monotonic()
        said, given = started, dataset.rows
        while not dataset.is_full and not self._is_enough(dataset.rows - given + waiting, play):
            ended = play.step()
            heard += [each for each in ended if len(each.ids) >= _SHORT_TOKENS]
            waiting += sum(len(conversation.ids) for conversation in ended)
            if waiting >= self._read_rows:
                dataset.read(executor, heard, self._read_rows)
                heard, waiting = [], 0
            if time.monotonic() - said >= _REPORT_S:
                said = time.monotonic()
                self._report_play(dataset.rows - given + waiting + play.tokens, said - started)
        heard += [each for each in play.close() if len(each.ids) >= _SHORT_TOKENS]
        dataset.read(executor, heard, self._read_rows)
        self._report_play(dataset.rows - given, time.monotonic() - started)

    def _report_play(self, tokens: int, elapsed_s: float) -> None:
        self._say(
            f"talked: {tokens} tokens in {elapsed_s:.0f} s, {tokens / max(elapsed_s, 1e-3):.0f} per second"
        )

    def _is_enough(self, tokens: int, play: SelfPlay) -> bool:
        if self._plan.tokens is not None:
            return tokens + play.tokens >= self._plan.tokens
        return self._elapsed_share() >= _TALK_SHARE

    def _elapsed_share(self) -> float:
        return (time.monotonic() - self._started) / (60 * (self._plan.minutes or 1e-6))

    def _train(self, dataset: TrainingRows, frozen: FrozenWeights) -> tuple[DraftHeadNet, float]:
        import torch

        from shardcompute.draft_training.training_loop import LoopOptions, new_net, train

        plan = self._plan
        learned, _ = dataset.split()
        random = torch.Generator(self._device).manual_seed(plan.seed)
        width = plan.width or -(-4 * self._spec.hidden // 64) * 64
        net = new_net(dataset, self._spec.norm_eps, blocks=plan.blocks, width=width, random=random)
        seconds = None
        if plan.tokens is None and plan.minutes is not None:
            seconds = 60 * plan.minutes * (1 - self._elapsed_share())
        epochs = None if seconds else plan.epochs
        training = LoopOptions(self._batch, soft=plan.soft, epochs=epochs, seconds=seconds)

        def report(share: float, rows: int, loss: float) -> None:
            self._say(f"trained: {share:.0%}, {rows} rows, loss {loss:.3f}")

        self._progress.start(f"Training a draft head of {self._checkpoint.name}", None)
        try:
            starts = dataset.starts(learned)
            loss = train(net, dataset, starts, frozen, training, random=random, report=report)
        finally:
            self._progress.finish()
        return net, loss

    def _evaluate(
        self,
        evaluate: Callable[..., Evaluation],
        weights: DraftHeadWeights,
        dataset: TrainingRows,
        frozen: FrozenWeights,
    ) -> Evaluation:
        from shardcompute.draft_training.training_loop import STEPS, load_net

        _, held_out = dataset.split()
        blocks = [(block.norm, block.gate_up.to_dense(), block.down.to_dense()) for block in weights.blocks]
        net = load_net(weights.join.to_dense(), blocks, weights.norm, self._spec.norm_eps, self._device)
        return evaluate(net, dataset, dataset.greedy_starts(held_out, STEPS), frozen)

    def _choose_vocabulary(self, dataset: TrainingRows) -> Any:
        """The tokens that were said or meant most often, and those that end an answer, in rising order."""
        import torch

        counts = torch.zeros(self._spec.vocab_size, dtype=torch.int64, device=self._device)
        for seen in (dataset.tokens, dataset.best):
            counts += torch.bincount(seen[: dataset.rows], minlength=len(counts))
        ends = [i for i in self._checkpoint.tokenizer().eos_ids if i < len(counts)]
        if ends:
            counts[ends] = counts.max() + 1
        order = counts.cpu().numpy().argsort(kind="stable")[::-1][: self._plan.vocabulary]
        return np.sort(order[counts.cpu().numpy()[order] > 0]).astype(np.int32)

    def _frozen_weights(self, ids: Any) -> FrozenWeights:
        import torch

        from shardcompute.draft_training.training_loop import FrozenWeights

        places = torch.full((self._spec.vocab_size,), -1, dtype=torch.int64, device=self._device)
        known = torch.from_numpy(ids).long().to(self._device)
        places[known] = torch.arange(len(ids), device=self._device)
        embedding = self._load("embedding") * self._spec.embedding_scale
        return FrozenWeights(embedding, self._load("head")[known], places, self._spec.norm_eps)

    def _load(self, name: str) -> Any:
        """A matrix of the model, dense and in float32 on the device."""
        import torch

        total = self._spec.layer_count
        stage = Stage(0, 1, total) if name == "embedding" else head_stage(self._spec)
        return torch.from_numpy(self._checkpoint.source(stage).matrix(name).to_dense()).to(self._device)

    def _open_model(self) -> TorchExecutor:
        from shardcompute.backends.torch import TorchExecutor

        spec = self._spec
        longest = -(-self._context_length // PAGE_TOKENS) * PAGE_TOKENS
        # Each conversation that is read in a step may leave most of a page empty, and there may be many short ones.
        tokens = (self._sessions + 1) * longest + self._read_rows * (1 + PAGE_TOKENS // _SHORT_TOKENS)
        kv_bytes = tokens * spec.kv_bytes_per_token_and_layer() * spec.layer_count
        options = ExecutorOptions(
            kv_bytes=kv_bytes if self._device.type == "cpu" else kv_bytes // 2,
            max_rows=max(self._read_rows, 2 * self._sessions),
            max_logit_rows=max(self._read_rows, self._sessions),
            context_length=self._context_length,
            threads=self._plan.threads,
            device=str(self._device),
        )
        stage = whole(spec)
        # Steps of so many rows would widen quantised matrices every time.
        return TorchExecutor(Decoder(spec, stage, self._checkpoint.source(stage, form="float32")), options)

    def _most_sessions(self) -> int:
        """As many as fill a part of the device: a step of 4,096 takes little longer than one of 512."""
        import torch

        spec = self._spec
        room = _MEMORY_SHARE * torch.cuda.get_device_properties(self._device).total_memory
        context = min(self._plan.context_length, spec.context_length)
        each = context * spec.kv_bytes_per_token_and_layer() * spec.layer_count // 2
        return max(64, min(4096, int(room / each)))

    def _capacity(self) -> int:
        """Rows that the device's memory has room for, or that are asked for."""
        import torch

        room = _HOST_BYTES
        if self._device.type == "cuda":
            room = int(_MEMORY_SHARE * torch.cuda.get_device_properties(self._device).total_memory)
        rows = room // (2 * self._spec.hidden + 10)
        wanted = self._plan.tokens
        return rows if wanted is None else min(rows, 2 * wanted + self._sessions * self._context_length)

    def _passages(self, ids: Sequence[int], dataset: TrainingRows) -> list[SelfPlayDialogue]:
        length = min(_PASSAGE_TOKENS, self._context_length)
        most = int(_PASSAGE_SHARE * dataset.capacity)
        parts = [tuple(ids[at : at + length]) for at in range(0, min(len(ids), most), length)]
        return [SelfPlayDialogue(part, len(part)) for part in parts]


def _pack(net: DraftHeadNet, ids: Any) -> DraftHeadWeights:
    def matrix(values: Any) -> Matrix:
        return convert(DenseMatrix(vector(values)), "int8")

    def vector(values: Any) -> Float32:
        return np.ascontiguousarray(values.detach().cpu().numpy(), dtype=np.float32)

    blocks = [DraftHeadBlock(vector(b.norm), matrix(b.gate_up), matrix(b.down)) for b in net.blocks]
    return DraftHeadWeights(ids, matrix(net.join), tuple(blocks), vector(net.norm))


def _choose_device_name(name: str) -> str:
    import torch

    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _percents(shares: Sequence[float]) -> str:
    return "  ".join(f"{share:.1%}" for share in shares)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and write one file; plain lines to standard output."""
    from shardcompute.core.settings import load_settings
    from shardcompute.weights.sources.reference import parse_reference
    from shardcompute.weights.sources.resolve import resolve

    defaults = TrainingOptions()
    parser = argparse.ArgumentParser(prog="python -m shardcompute.draft_training.train", description=__doc__)
    parser.add_argument("model", help="a folder, a .gguf file or any other name of a model")
    parser.add_argument("file", type=Path, help="where to write what was trained")
    parser.add_argument("--text", type=Path, help="a file of text to learn from as well")
    parser.add_argument("--minutes", type=float, default=defaults.minutes)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--epochs", type=float, default=defaults.epochs)
    parser.add_argument("--device", default=defaults.device)
    parser.add_argument("--soft", type=float, default=defaults.soft)
    for name in ("blocks", "width", "vocabulary", "sessions", "batch", "threads", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    given = vars(parser.parse_args(arguments))
    model, file, text = given.pop("model"), given.pop("file"), given.pop("text")
    try:
        with open_checkpoint(resolve(parse_reference(model), load_settings())) as checkpoint:
            content = "" if text is None else text.read_text(errors="replace")
            trained = train_draft_head(checkpoint, TrainingOptions(**given), text=content, say=_print_line)
    except ShardComputeError as error:
        print(f"{error}\n{error.hint}".rstrip(), file=sys.stderr)
        return 1
    file.write_bytes(encode_draft_head(trained.weights))
    _print_line(f"{file}: {file.stat().st_size} bytes")
    return 0


def _print_line(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
