"""`shardcompute zk …`: prove what a small head makes of a hidden state, without showing it. Needs the extra `zk`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardcompute.cli.console import open_screen
from shardcompute.core.errors import SourceError, UsageError

if TYPE_CHECKING:
    from shardcompute.security.zero_knowledge.head_proof import HeadClaim

app = typer.Typer(
    help="Prove what a small linear head makes of a hidden state that was committed to (extra zk).",
    no_args_is_help=True,
)
Audit = Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the audit, as `zk setup` made it.")]
State = Annotated[Path, typer.Argument(metavar="STATE", help="A hidden state: one row of numbers, as .npy.")]
_MOST_BYTES = 4 << 20


@app.command()
def setup(
    head: Annotated[
        Path,
        typer.Argument(metavar="HEAD", help="The head, as .npz with `weight` [outputs, inputs] and `bias`."),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the audit is to be.")],
) -> None:
    """Prepare an audit: circuit, keys and a reference string, made here.

    Give the folder to the prover without what is in `auditor`. Whoever makes the string can forge proofs under it, so a
    proof convinces you, and nobody else.
    """
    from shardcompute.security.zero_knowledge.head_proof import prepare_audit

    found = _load(head)
    try:
        weight, bias = found["weight"], found["bias"]
    except (KeyError, IndexError) as error:
        raise UsageError(f"{head} has no weight and bias", hint="write it with numpy.savez") from error
    prepare_audit(weight.astype("float32"), bias.astype("float32"), folder)
    open_screen().say(f"the audit is in {folder}; keep {folder / 'auditor'} to yourself")


@app.command()
def commit(folder: Audit, state: State) -> None:
    """Print the hash that commits to a state."""
    from shardcompute.security.zero_knowledge.head_proof import commit_state

    open_screen().write(commit_state(folder, _row(state)) + "\n")


@app.command()
def prove(
    folder: Audit,
    state: State,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write the proof.")],
) -> None:
    """Prove what the head makes of a state."""
    from shardcompute.security.zero_knowledge.head_proof import prove_head

    open_screen().say(_told(prove_head(folder, _row(state), out)))


@app.command()
def verify(
    folder: Audit,
    proof: Annotated[Path, typer.Argument(metavar="PROOF", help="As `zk prove` wrote it.")],
    *,
    commitment: Annotated[
        str, typer.Option("--commitment", metavar="HEX", help="What the prover has committed to.")
    ],
) -> None:
    """Check a proof against a commitment. The exit code is 10 where it does not hold."""
    from shardcompute.security.zero_knowledge.head_proof import verify_head

    open_screen().say(f"good: {_told(verify_head(folder, proof, commitment))}")


def _told(claim: HeadClaim) -> str:
    return f"from state {claim.commitment} come {', '.join(f'{each:.4f}' for each in claim.outputs)}"


def _row(path: Path) -> Any:
    return _load(path).astype("float32").reshape(-1)


def _load(path: Path) -> Any:
    import numpy as np

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is far too large", hint="a head or a state has a few thousand numbers")
        with path.open("rb") as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}", hint="check the name") from error
    except (ValueError, EOFError) as error:
        raise UsageError(f"{path} holds no numbers: {error}", hint="write it with numpy") from error
