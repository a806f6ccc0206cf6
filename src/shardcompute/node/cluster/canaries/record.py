"""Record of canaries: the secret of the bank, the answers that are known, and how far chains and machines have drifted.

One JSON file of bounded size in the cluster's folder, written anew after every canary. A record that cannot be read
begins anew: it holds nothing that is not found out again.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from shardcompute.core.errors import SourceError
from shardcompute.security.private_files import replace_private
from shardcompute.trust.canaries import DriftEstimate, observe_canary

log = logging.getLogger(__name__)
MOST_CLASSES = 16
_MOST_CHAINS = 64
_MOST_MACHINES = 1024
_MOST_BYTES = 8 << 20
_SECRET_BYTES = 32


class KnownAnswers(Struct, frozen=True):
    """Of one class of chains: by the number of a canary, the tokens that came first."""

    answers: dict[int, tuple[int, ...]] = {}
    used_s: float = 0.0


class CanaryNotes(Struct, frozen=True):
    """All of it. Chains are named by their class, machines by node id."""

    secret: bytes
    classes: dict[str, KnownAnswers] = {}
    chains: dict[str, DriftEstimate] = {}
    machines: dict[str, DriftEstimate] = {}

    def with_answer(
        self, chain_class: str, number: int, tokens: tuple[int, ...], now_s: float
    ) -> CanaryNotes:
        known = self.classes.get(chain_class, KnownAnswers())
        answers = {**known.answers, number: tokens}
        classes = {**self.classes, chain_class: KnownAnswers(answers, now_s)}
        return msgspec.structs.replace(self, classes=_newest(classes, MOST_CLASSES))

    def with_reading(
        self, chain_class: str, machines: tuple[str, ...], agreed: float, now_s: float
    ) -> CanaryNotes:
        known = self.classes[chain_class]
        chain = observe_canary(self.chains.get(chain_class, DriftEstimate()), agreed, now_s)
        seen = {
            node: observe_canary(self.machines.get(node, DriftEstimate()), agreed, now_s) for node in machines
        }
        return msgspec.structs.replace(
            self,
            classes={**self.classes, chain_class: msgspec.structs.replace(known, used_s=now_s)},
            chains=_latest({**self.chains, chain_class: chain}, _MOST_CHAINS),
            machines=_latest({**self.machines, **seen}, _MOST_MACHINES),
        )


def _newest(classes: dict[str, KnownAnswers], most: int) -> dict[str, KnownAnswers]:
    kept = sorted(classes, key=lambda each: -classes[each].used_s)[:most]
    return {each: classes[each] for each in kept}


def _latest(known: dict[str, DriftEstimate], most: int) -> dict[str, DriftEstimate]:
    kept = sorted(known, key=lambda each: -known[each].at_s)[:most]
    return {each: known[each] for each in kept}


def open_notes(path: Path) -> CanaryNotes:
    """What is on disk; else a new bank, which nobody has seen."""
    try:
        if path.stat().st_size <= _MOST_BYTES:
            return msgspec.json.decode(path.read_bytes(), type=CanaryNotes)
        log.warning("%s is too large for a record of canaries: it begins anew", path)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("the record of canaries cannot be read and begins anew: %s", error)
    return CanaryNotes(secrets.token_bytes(_SECRET_BYTES))


def save_notes(path: Path, notes: CanaryNotes) -> None:
    """Whole or not at all; only its owner may read which prompts are canaries."""
    try:
        replace_private(path, msgspec.json.encode(notes))
    except (SourceError, OSError) as error:
        log.warning("canaries cannot be written down: %s", error)
