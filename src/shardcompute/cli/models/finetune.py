"""`shardcompute finetune`: teach a model with examples, and get an adapter that is served beside it."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import typer

from shardcompute.cli.cluster.access import ClusterLocation
from shardcompute.cli.console import Screen, open_screen
from shardcompute.cli.models.finetune_curve import TerminalCurve
from shardcompute.cli.models.finetune_options import (
    Alpha,
    Batch,
    Beta,
    CheckpointEvery,
    Clip,
    CodecName,
    Copies,
    DataFile,
    Device,
    Dropout,
    Dtype,
    Epochs,
    EvaluateEvery,
    HasSamples,
    HeldOut,
    InSwarm,
    IsBottleneck,
    IsDora,
    IsDryRun,
    IsFresh,
    IsRankStabilised,
    KeptLayers,
    Licence,
    LossName,
    MaxLength,
    MergeInto,
    MicroBatches,
    MostWorkers,
    Out,
    Patience,
    Rank,
    Rate,
    Recompute,
    ScheduleName,
    Seed,
    ServedAs,
    Share,
    Steps,
    Targets,
    TaughtModel,
    TeacherModel,
    Temperature,
    Warmup,
    WeightDecay,
)
from shardcompute.cli.models.finetune_swarm import (
    HomeLayers,
    SwarmChoice,
    push_adapter,
    teach_through_cluster,
)
from shardcompute.cli.options.engine import Threads
from shardcompute.cli.options.records import with_options
from shardcompute.cli.progress import waiting
from shardcompute.core.errors import BackendError, UsageError
from shardcompute.core.settings import load_settings
from shardcompute.core.units import count_of, format_bytes, format_seconds
from shardcompute.weights.sources.reference import parse_reference

if TYPE_CHECKING:
    from shardcompute.finetune.estimate import RunEstimate
    from shardcompute.finetune.local import LocalOptions
    from shardcompute.finetune.plan import AdapterKind, FinetunePlan
    from shardcompute.finetune.preparation import PreparedRun
    from shardcompute.finetune.training import CurvePoint, OnStep, RunCadence, Taught
    from shardcompute.weights.checkpoint import Checkpoint

_STATE_COPIES = 6
"""A checkpoint and the one before it hold what is learned and two moments each."""
_SAMPLES = 2


@with_options
def finetune(
    *,
    model: TaughtModel,
    data: DataFile,
    out: Out = Path("adapter"),
    rank: Rank = 8,
    alpha: Alpha = None,
    targets: Targets = "",
    is_rank_stabilised: IsRankStabilised = False,
    dora: IsDora = False,
    bottleneck: IsBottleneck = False,
    merge: MergeInto = None,
    dropout: Dropout = 0.0,
    loss: LossName = "cross-entropy",
    beta: Beta = 0.1,
    teacher: TeacherModel = "",
    temperature: Temperature = 1.0,
    epochs: Epochs = 1.0,
    steps: Steps = 0,
    batch: Batch = 8,
    micro_batches: MicroBatches = 2,
    rate: Rate = 2e-4,
    warmup: Warmup = 0,
    schedule: ScheduleName = "linear",
    weight_decay: WeightDecay = 0.0,
    clip: Clip = 1.0,
    max_length: MaxLength = 512,
    seed: Seed = 1,
    held_out: HeldOut = None,
    eval_every: EvaluateEvery = 20,
    patience: Patience = 0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    recompute: Recompute = None,
    threads: Threads = None,
    checkpoint_every: CheckpointEvery = 10,
    dry_run: IsDryRun = False,
    is_fresh: IsFresh = False,
    samples: HasSamples = True,
    licence: Licence = "",
    swarm: InSwarm = False,
    workers: MostWorkers = 0,
    copies: Copies = 1,
    codec: CodecName = "exact",
    share: Share = 1.0,
    keep_local: KeptLayers = 0,
    serve_as: ServedAs = "",
    at: ClusterLocation,
) -> None:
    """Teach a model with examples (LoRA, DoRA), and write an adapter that is served beside it.

    The weights stay as they are; small additions to them are learned. The folder that comes of it is what PEFT writes:
    serve it with `--adapter NAME=FOLDER` and ask for `model:NAME`, or load it with `peft`. A run that was cut short is
    gone on with by the same command, to the same bytes. With --swarm the workers of a cluster that serves the model
    teach it, each some of its layers, while it serves on; one that is lost is done without. Needs torch, also there.
    """
    if importlib.util.find_spec("torch") is None:
        raise BackendError("teaching needs torch", hint="pip install 'shardcompute[torch]'")
    from shardcompute.finetune.plan import LOSSES, SCHEDULES, FinetunePlan, LoraShape, LossShape
    from shardcompute.finetune.training import RunCadence

    chosen = next((each for each in SCHEDULES if each == schedule), None)
    if chosen is None:
        raise typer.BadParameter(f"use one of {', '.join(SCHEDULES)}", param_hint="--schedule")
    chosen_loss = next((each for each in LOSSES if each == loss), None)
    if chosen_loss is None:
        raise typer.BadParameter(f"use one of {', '.join(LOSSES)}", param_hint="--loss")
    if (chosen_loss == "kl") != bool(teacher):
        raise UsageError("--loss kl and --teacher MODEL belong together", hint="give both, or neither")
    kind = _adapter_kind(dora=dora, bottleneck=bottleneck, serve_as=serve_as)
    names = tuple(part.strip() for part in targets.split(",") if part.strip())
    plan = FinetunePlan(
        steps=steps,
        batch=batch,
        micro_batches=micro_batches,
        rate=rate,
        warmup=warmup,
        schedule=chosen,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        longest=max_length,
        lora=LoraShape(rank, alpha or 2.0 * rank, names, is_rank_stabilised, dropout, kind),
        loss=LossShape(chosen_loss, beta, temperature),
    )
    loop = RunCadence(checkpoint_every, eval_every, patience)
    machine = _local_options(device, dtype, recompute, threads)
    if serve_as and not swarm:
        raise UsageError(
            "--serve-as is for --swarm", hint="serve a folder with: up MODEL --adapter NAME=FOLDER"
        )
    if teacher and swarm and not keep_local:
        raise UsageError(
            "a teacher speaks on this machine, and with --swarm the loss is computed elsewhere",
            hint="keep the last layers here as well, with --keep-local 1, or leave out --swarm",
        )
    if keep_local and not swarm:
        raise UsageError("--keep-local is for --swarm", hint="without it everything stays on this machine")
    if keep_local and copies > 1:
        raise UsageError(
            "--keep-local has one copy of each stage",
            hint="leave out --copies, or keep nothing on this machine",
        )
    chosen_swarm = SwarmChoice(workers, codec, share, bool(recompute), copies) if swarm else None
    if chosen_swarm is not None and keep_local:
        chosen_swarm = replace(chosen_swarm, home=HomeLayers(keep_local, machine))
    _Run(open_screen(), model, out, licence, machine, loop, at, chosen_swarm, serve_as, merge, teacher).run(
        data, held_out, plan, epochs, dry_run=dry_run, is_fresh=is_fresh, samples=samples
    )


def _adapter_kind(*, dora: bool, bottleneck: bool, serve_as: str) -> AdapterKind:
    """What of adapter is learned; UsageError where it could not be served as it was asked for."""
    if dora and bottleneck:
        raise UsageError("--dora and --bottleneck are two kinds of adapter", hint="leave one of them out")
    if serve_as and dora:
        raise UsageError(
            "--serve-as keeps additions beside the weights, and DoRA changes the length of these as well",
            hint="use --merge FOLDER and serve that: shardcompute load FOLDER",
        )
    if serve_as and bottleneck:
        raise UsageError("bottlenecks are not served", hint="leave out --bottleneck, or --serve-as")
    return "dora" if dora else "bottleneck" if bottleneck else "lora"


def _local_options(device: str, dtype: str, recompute: bool | None, threads: int | None) -> LocalOptions:
    import torch

    from shardcompute.backends.processor import default_threads
    from shardcompute.backends.torch.device import choose_device
    from shardcompute.finetune.local import LocalOptions

    if device == "auto":
        has_mps = torch.backends.mps.is_available()
        device = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    count = threads or load_settings().threads or default_threads()
    return LocalOptions(str(choose_device(device)), dtype, count, 1, recompute)


@dataclass(frozen=True, slots=True)
class _Run:
    """One command: prepare, say what it takes, teach, write, show."""

    screen: Screen
    model: str
    out: Path
    licence: str
    machine: LocalOptions
    loop: RunCadence
    at: ClusterLocation
    swarm: SwarmChoice | None
    serve_as: str
    merge: Path | None
    teacher: str

    def run(
        self,
        data: Path,
        held_out: Path | None,
        plan: FinetunePlan,
        epochs: float,
        *,
        dry_run: bool,
        is_fresh: bool,
        samples: bool,
    ) -> None:
        from shardcompute.finetune.losses.teacher import check_teacher
        from shardcompute.finetune.preparation import clear_resume, prepare_folder, prepare_run
        from shardcompute.finetune.result.merged_folder import check_merge
        from shardcompute.finetune.split.ownership import own_stages
        from shardcompute.weights.checkpoint import open_checkpoint
        from shardcompute.weights.served import weights_key
        from shardcompute.weights.sources.resolve import resolve

        screen, reference = self.screen, parse_reference(self.model)
        with waiting(screen, f"opening {reference}") as progress:
            checkpoint = open_checkpoint(resolve(reference, load_settings(), progress))
        with checkpoint, ExitStack() as stack:
            teacher = stack.enter_context(self._open_teacher()) if self.teacher else None
            if teacher is not None:
                plan = replace(plan, loss=replace(plan.loss, teacher=weights_key(teacher)))
            prepared = prepare_run(
                data,
                held_out,
                checkpoint.tokenizer(),
                plan,
                epochs=epochs,
                context_length=checkpoint.spec.context_length,
                vocab_size=checkpoint.spec.vocab_size,
            )
            if teacher is not None:
                check_teacher(checkpoint, teacher, prepared.taught.examples, prepared.plan.longest)
            if self.swarm is not None and self.swarm.home is not None:
                own_stages(checkpoint.spec.layer_count, self.swarm.home.kept)
            if self.merge is not None:
                check_merge(checkpoint, plan.lora.kind, self.merge)
            estimate = self._say_estimate(checkpoint, prepared, is_timed=dry_run)
            if dry_run:
                return
            folder = prepare_folder(
                self.out, estimate.parameters * 4 * (_STATE_COPIES + 1), is_fresh=is_fresh
            )
            taught = self._teach(checkpoint, prepared, folder, teacher)
            self._write(checkpoint, prepared, taught, samples=samples)
            clear_resume(self.out)
            folder.rmdir()
            self._say_result(taught, plan.lora.kind)
            if self.swarm is not None and self.serve_as:
                push_adapter(self.at, checkpoint.name, self.model, self.serve_as, self.out, screen)

    def _open_teacher(self) -> Checkpoint:
        from shardcompute.weights.checkpoint import open_checkpoint
        from shardcompute.weights.sources.resolve import resolve

        reference = parse_reference(self.teacher)
        with waiting(self.screen, f"opening {reference}") as progress:
            return open_checkpoint(resolve(reference, load_settings(), progress))

    def _teach(
        self, checkpoint: Checkpoint, prepared: PreparedRun, resume: Path, teacher: Checkpoint | None
    ) -> Taught:
        curve = TerminalCurve(prepared.plan.steps)

        def on_step(point: CurvePoint, seconds: float) -> None:
            self.screen.say(curve.line(point, seconds))

        taught = self._run_steps(checkpoint, prepared, resume, teacher, on_step)
        for line in curve.lines():
            self.screen.say(line)
        return taught

    def _run_steps(
        self,
        checkpoint: Checkpoint,
        prepared: PreparedRun,
        resume: Path,
        teacher: Checkpoint | None,
        on_step: OnStep,
    ) -> Taught:
        from shardcompute.finetune.local import teach_here

        if self.swarm is not None:
            with self.at.connect() as client:
                return teach_through_cluster(
                    client,
                    checkpoint,
                    prepared,
                    resume,
                    self.swarm,
                    self.loop,
                    teacher=teacher,
                    on_step=on_step,
                    say=self.screen.say,
                )
        return teach_here(
            checkpoint,
            prepared,
            resume,
            self.machine,
            self.loop,
            available_bytes=psutil.virtual_memory().available,
            teacher=teacher,
            on_step=on_step,
            say=self.screen.say,
        )

    def _write(self, checkpoint: Checkpoint, prepared: PreparedRun, taught: Taught, *, samples: bool) -> None:
        """The folder; with samples, twice: an adapter has to be there to answer with."""
        from shardcompute.finetune.local import adapted_modules
        from shardcompute.finetune.peft_folder import AdapterCard, write_peft_folder
        from shardcompute.finetune.preparation import licence_of
        from shardcompute.finetune.result.merged_folder import write_merged_folder

        modules = adapted_modules(checkpoint, prepared.plan)
        card = AdapterCard(
            checkpoint.name,
            self.licence or licence_of(checkpoint.files),
            prepared.data.name,
            prepared.sha256,
            len(prepared.taught.examples),
            prepared.plan,
            taught.curve,
        )
        write_peft_folder(self.out, taught.learned, modules, card)
        if samples:
            card = replace(card, samples=self._sample(checkpoint, prepared, taught))
            write_peft_folder(self.out, taught.learned, modules, card)
        if self.merge is not None:
            write_merged_folder(self.merge, checkpoint, self.out, card)

    def _sample(
        self, checkpoint: Checkpoint, prepared: PreparedRun, taught: Taught
    ) -> tuple[tuple[str, str, str], ...]:
        """Prompts with answers before and after, which are said as well."""
        from shardcompute.finetune.local import sample_here
        from shardcompute.finetune.samples import prompts_of, sample_both

        tokenizer = checkpoint.tokenizer()
        prompts = prompts_of(prepared.held_out or prepared.taught.examples, _SAMPLES)
        if prepared.plan.lora.kind == "lora":
            answers = sample_both(checkpoint, self.out, prompts, self.machine.threads)
        else:
            answers = sample_here(checkpoint, prepared, taught.learned, prompts, self.machine)
        shown = []
        for prompt, (before, after) in zip(prompts, answers, strict=True):
            shown.append(tuple(tokenizer.decode(ids) for ids in (prompt, before, after)))
            for label, text in zip(("asked", "before", "after"), shown[-1], strict=True):
                self.screen.say(f"{label + ':':8}{' '.join(text.split())}")
        return tuple((prompt, before, after) for prompt, before, after in shown)

    # What is said

    def _say_estimate(self, checkpoint: Checkpoint, prepared: PreparedRun, *, is_timed: bool) -> RunEstimate:
        from shardcompute.finetune.local import measure_operations, plan_here

        say, plan, taught = self.screen.say, prepared.plan, prepared.taught
        available = psutil.virtual_memory().available
        estimate = plan_here(checkpoint, prepared, self.machine, available)
        say(
            f"{count_of(len(taught.examples), 'example')}, {taught.tokens} tokens, {taught.learned} of them learned; "
            f"{count_of(plan.steps, 'step')} of {plan.batch} examples"
        )
        if taught.shortened or taught.dropped:
            say(
                f"{taught.shortened} cut at {plan.longest} tokens, {taught.dropped} dropped with nothing to learn"
            )
        if prepared.held_out:
            say(f"{count_of(len(prepared.held_out), 'example')} held out")
        say(
            f"{estimate.parameters} numbers are learned; about {format_bytes(estimate.total_bytes)} of memory "
            f"({format_bytes(available)} free)"
            + (", activations computed again" if estimate.recomputes else "")
        )
        if not is_timed:
            return estimate
        seconds = estimate.seconds(measure_operations(self.machine.threads, self.machine.device))
        say(f"about {format_seconds(seconds)} on {self.machine.device} with {self.machine.threads} threads")
        boundary = 2 * estimate.step_tokens * checkpoint.spec.hidden * 4
        say(
            f"in a swarm, {format_bytes(boundary)} for each step between two stages, "
            f"{format_bytes(boundary * plan.steps)} in all"
        )
        return estimate

    def _say_result(self, taught: Taught, kind: AdapterKind) -> None:
        early = " (ended early: what is held out got no better)" if taught.is_early else ""
        self.screen.say(f"taught in {format_seconds(taught.seconds)}{early}: {self.out}")
        if self.merge is not None:
            self.screen.say(f"serve it: shardcompute up {self.merge}")
        elif kind == "lora":
            self.screen.say(f"serve it: shardcompute up {self.model} --adapter {self.out.name}={self.out}")
        elif kind == "dora":
            self.screen.say(f"serve it: shardcompute up {self.model} --merge-adapter {self.out}")
