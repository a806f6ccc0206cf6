"""Options of `shardcompute finetune`: what is learned, how, and where it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_LORA, _COURSE, _MACHINE = "What is learned", "How it is learned", "Where it is computed"
_SWARM = "In a swarm"

TaughtModel = Annotated[str, typer.Argument(metavar="MODEL", help="The model to teach.", show_default=False)]
DataFile = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help='JSON lines: {"messages": […]}, {"prompt": …, "completion": …} or {"text": …}; '
        'for --loss dpo {"prompt": …, "chosen": …, "rejected": …}.',
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the adapter goes.")]
Rank = Annotated[
    int, typer.Option("--rank", metavar="N", help="Rank of the additions.", rich_help_panel=_LORA)
]
Alpha = Annotated[
    float | None,
    typer.Option("--alpha", metavar="A", help="Their scale times the rank; by default twice the rank.",
                 rich_help_panel=_LORA),
]  # fmt: skip
Targets = Annotated[
    str,
    typer.Option("--targets", metavar="NAME,…", rich_help_panel=_LORA,
                 help="Linear maps to adapt, such as q_proj,v_proj; by default all of each layer."),
]  # fmt: skip
IsRankStabilised = Annotated[
    bool,
    typer.Option("--rslora", help="Scale by the root of the rank (rsLoRA).", rich_help_panel=_LORA),
]
IsDora = Annotated[
    bool,
    typer.Option("--dora", rich_help_panel=_LORA,
                 help="Learn the length of each row of weights besides (DoRA); served when it is merged."),
]  # fmt: skip
IsBottleneck = Annotated[
    bool,
    typer.Option("--bottleneck", rich_help_panel=_LORA,
                 help="Instead of additions to maps, a small network behind each block; it is not served."),
]  # fmt: skip
MergeInto = Annotated[
    Path | None,
    typer.Option("--merge", metavar="FOLDER", rich_help_panel=_LORA,
                 help="Write the model with the adapter merged into it, too."),
]  # fmt: skip
Dropout = Annotated[
    float,
    typer.Option("--dropout", metavar="P", help="Share of inputs dropped by chance.", rich_help_panel=_LORA),
]
LossName = Annotated[
    str,
    typer.Option("--loss", metavar="cross-entropy|dpo|kl", rich_help_panel=_COURSE,
                 help="What is made smaller: dpo learns which of two answers is better, kl what a teacher would say."),
]  # fmt: skip
Beta = Annotated[
    float,
    typer.Option("--beta", metavar="B", help="With dpo: how dear it is to leave the model as it was.",
                 rich_help_panel=_COURSE),
]  # fmt: skip
TeacherModel = Annotated[
    str,
    typer.Option("--teacher", metavar="MODEL", help="With kl: the model to come near to, run on this machine.",
                 rich_help_panel=_COURSE),
]  # fmt: skip
Temperature = Annotated[
    float,
    typer.Option("--temperature", metavar="T", help="With kl: how much unlikely tokens count.",
                 rich_help_panel=_COURSE),
]  # fmt: skip
Epochs = Annotated[
    float,
    typer.Option("--epochs", metavar="E", min=0.01, help="How often each example is learned from.",
                 rich_help_panel=_COURSE),
]  # fmt: skip
Steps = Annotated[
    int,
    typer.Option("--steps", metavar="N", min=0, help="Instead: so many steps.", rich_help_panel=_COURSE),
]
Batch = Annotated[
    int, typer.Option("--batch", metavar="N", min=1, help="Examples of a step.", rich_help_panel=_COURSE)
]
MicroBatches = Annotated[
    int,
    typer.Option("--micro-batches", metavar="N", min=1, rich_help_panel=_COURSE,
                 help="Parts that a step goes through the stages in: more need less memory each."),
]  # fmt: skip
Rate = Annotated[float, typer.Option("--rate", metavar="R", help="Learning rate.", rich_help_panel=_COURSE)]
Warmup = Annotated[
    int,
    typer.Option("--warmup", metavar="N", min=0, help="Steps that it rises over.", rich_help_panel=_COURSE),
]
ScheduleName = Annotated[
    str,
    typer.Option("--schedule", metavar="constant|linear|cosine", help="How it falls after that.",
                 rich_help_panel=_COURSE),
]  # fmt: skip
WeightDecay = Annotated[
    float, typer.Option("--weight-decay", metavar="W", help="AdamW's.", rich_help_panel=_COURSE)
]
Clip = Annotated[
    float,
    typer.Option(
        "--clip", metavar="N", help="Largest norm of all gradients; 0: any.", rich_help_panel=_COURSE
    ),
]
MaxLength = Annotated[
    int,
    typer.Option("--max-length", metavar="N", min=2, help="Tokens of an example.", rich_help_panel=_COURSE),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, help="Begins what is left to chance.",
                      rich_help_panel=_COURSE)
]  # fmt: skip
HeldOut = Annotated[
    Path | None,
    typer.Option("--eval", metavar="FILE", rich_help_panel=_COURSE,
                 help="Examples to watch and not to learn from; the best state on them is kept."),
]  # fmt: skip
EvaluateEvery = Annotated[
    int,
    typer.Option("--eval-every", metavar="N", min=1, help="Steps between two looks at them.",
                 rich_help_panel=_COURSE),
]  # fmt: skip
Patience = Annotated[
    int,
    typer.Option("--patience", metavar="N", min=0, rich_help_panel=_COURSE,
                 help="End after so many looks without a better one; 0: never."),
]  # fmt: skip
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME", help="cpu, cuda, cuda:1, mps or auto.", rich_help_panel=_MACHINE
    ),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", metavar="float32|bfloat16", rich_help_panel=_MACHINE,
                 help="Of frozen weights and activations; what is learned is float32."),
]  # fmt: skip
Recompute = Annotated[
    bool | None,
    typer.Option("--recompute/--no-recompute", rich_help_panel=_MACHINE, show_default="where memory is short",
                 help="Compute activations again instead of keeping them."),
]  # fmt: skip
CheckpointEvery = Annotated[
    int,
    typer.Option("--checkpoint-every", metavar="N", min=1, help="Steps between two checkpoints.",
                 rich_help_panel=_MACHINE),
]  # fmt: skip
IsDryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and leave it at that.")]
IsFresh = Annotated[
    bool, typer.Option("--fresh", help="Begin anew, whatever an earlier run has left in the folder.")
]
HasSamples = Annotated[bool, typer.Option("--samples/--no-samples", help="Show answers before and after.")]
Licence = Annotated[
    str, typer.Option("--licence", metavar="NAME", help="For the card; by default the base's.")
]
InSwarm = Annotated[
    bool,
    typer.Option(
        "--swarm",
        rich_help_panel=_SWARM,
        help="Teach on the workers of a running cluster that serves the model, each a stage of its layers.",
    ),
]
MostWorkers = Annotated[
    int,
    typer.Option(
        "--workers", metavar="N", min=0, rich_help_panel=_SWARM, help="At most so many of them; 0: all."
    ),
]
Copies = Annotated[
    int,
    typer.Option(
        "--copies",
        metavar="N",
        min=1,
        rich_help_panel=_SWARM,
        help="Have so many workers for each stage, which add up their gradients and share the optimiser.",
    ),
]
CodecName = Annotated[
    str,
    typer.Option(
        "--codec",
        metavar="NAME",
        rich_help_panel=_SWARM,
        help="Form of activations and gradients between them: exact, or smaller such as bf16 or int8.",
    ),
]
Share = Annotated[
    float,
    typer.Option(
        "--share",
        metavar="S",
        min=0.01,
        max=1.0,
        rich_help_panel=_SWARM,
        help="Share of their time that it may compute; serving has the rest to itself.",
    ),
]
KeptLayers = Annotated[
    int,
    typer.Option(
        "--keep-local",
        metavar="K",
        min=0,
        rich_help_panel=_SWARM,
        help="Keep tokens and labels on this machine, with the first and the last K layers; others see states and "
        "gradients alone.",
    ),
]
ServedAs = Annotated[
    str,
    typer.Option(
        "--serve-as",
        metavar="NAME",
        rich_help_panel=_SWARM,
        help="Have the cluster serve the adapter then, as MODEL:NAME.",
    ),
]
