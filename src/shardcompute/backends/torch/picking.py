"""Picking on the device: what the host's sampler would pick, found where the logits are.

The same steps as `decoding.sampler` and `decoding.filters`, over many rows at once. Scores, floors and noise's bits are
computed alike on every machine; sums of probabilities, and the logarithms in the noise, may differ in their last
digits. Where that could make another token win, and where a filter leaves more than `MOST_SORTED` tokens, the row is
*unsure*: the host is to pick from its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardcompute.backends.executor import PickRule
from shardcompute.backends.host.splitmix import GAMMA, MIX_A, MIX_B
from shardcompute.backends.torch.transfers import upload

MOST_SORTED = 1024
UNSURE_MASS = 4e-6
"""Of all probability: so near to top-p's edge, rounding decides."""
UNSURE_NOISE = 1e-9
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class _Rules:
    """What rows are to be drawn by, `[rows, 1]` on the device; None: no row has such a filter."""

    temperatures: torch.Tensor
    reaches: torch.Tensor
    keys: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    least_scores: torch.Tensor | None


def can_draw(rule: PickRule) -> bool:
    """Whether rows may be drawn by this rule here at all."""
    return rule.top_k <= MOST_SORTED


def draw_rows(logits: torch.Tensor, rules: Sequence[PickRule]) -> tuple[torch.Tensor, torch.Tensor]:
    """The token that each of these float32 rows is to give, by rules with a temperature; and which are unsure."""
    on_device = _upload_rules(rules, logits.shape[1], logits.device)
    best = logits.max(dim=1, keepdim=True).values
    unsure = ~torch.isfinite(best)
    # An unsure row must not disturb the sums below.
    best = torch.where(unsure, torch.zeros_like(best), best)
    floor = (best.double() - on_device.reaches).float()
    floor = torch.nextafter(floor, torch.full_like(floor, -torch.inf)).clamp(min=_LOWEST)
    kept = logits >= floor
    scores = (logits - best) / on_device.temperatures
    if on_device.top_k is not None or on_device.top_p is not None:
        kept, is_edge_near = _keep_best(logits, scores, kept, on_device)
        unsure |= is_edge_near
    if on_device.least_scores is not None:
        kept &= scores >= on_device.least_scores
    noisy = _noise(on_device.keys, logits.shape[1]) + scores.double()
    noisy = torch.where(kept, noisy, torch.full_like(noisy, -torch.inf))
    highest, tokens = noisy.max(dim=1, keepdim=True)
    unsure |= (noisy >= highest - UNSURE_NOISE).sum(dim=1, keepdim=True) != 1
    return tokens.squeeze(1), unsure.squeeze(1)


def _upload_rules(rules: Sequence[PickRule], vocab_size: int, device: torch.device) -> _Rules:
    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=dtype)[:, None], device)

    keys = torch.tensor([_signed(rule.key) for rule in rules], dtype=torch.int64)
    has_top_k = any(0 < rule.top_k < vocab_size for rule in rules)
    has_top_p = any(rule.top_p < 1.0 for rule in rules)
    has_least = any(rule.least_score > -torch.inf for rule in rules)
    return _Rules(
        temperatures=column([rule.temperature for rule in rules], torch.float32),
        reaches=column([rule.reach for rule in rules], torch.float64),
        keys=upload(keys[:, None], device),
        top_k=column([rule.top_k for rule in rules], torch.int64) if has_top_k else None,
        top_p=column([rule.top_p for rule in rules], torch.float64) if has_top_p else None,
        least_scores=column([rule.least_score for rule in rules], torch.float32) if has_least else None,
    )


def _keep_best(
    logits: torch.Tensor, scores: torch.Tensor, kept: torch.Tensor, rules: _Rules
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that top-k and top-p leave of those kept, and which rows are unsure. Lower ids win among equals."""
    rows, vocab_size = logits.shape
    count = min(MOST_SORTED, vocab_size)
    sorted_logits, order = torch.topk(logits, count, dim=1)
    sorted_scores, sorted_kept = scores.gather(1, order), kept.gather(1, order)
    ranks = torch.arange(1, count + 1, device=logits.device)[None, :]
    has_k = torch.zeros((rows, 1), dtype=torch.bool, device=logits.device)
    if rules.top_k is not None:
        has_k = (rules.top_k > 0) & (rules.top_k < vocab_size)
        sorted_kept &= ~has_k | (ranks <= rules.top_k)
    needed = torch.where(has_k, sorted_kept.sum(dim=1, keepdim=True), vocab_size)
    unsure = torch.zeros_like(has_k)
    if rules.top_p is not None:
        weights = torch.where(sorted_kept, torch.exp(sorted_scores).double(), 0.0)
        mass = weights.cumsum(dim=1)
        # Without top-k, what was not sorted counts too.
        everything = torch.where(kept, torch.exp(scores).double(), 0.0).sum(dim=1, keepdim=True)
        total = torch.where(has_k, mass[:, -1:], everything)
        target = rules.top_p * total
        has_p = rules.top_p < 1.0
        reached = mass < target
        by_mass = reached.sum(dim=1, keepdim=True) + 1
        unsure |= has_p & (by_mass > sorted_kept.sum(dim=1, keepdim=True))
        unsure |= has_p & ((mass - target).abs() <= UNSURE_MASS * total).any(dim=1, keepdim=True)
        needed = torch.where(has_p, torch.minimum(by_mass, needed), needed)
    is_cut = needed < vocab_size
    edge = sorted_logits.gather(1, (needed.clamp(max=count) - 1).clamp(min=0))
    above, at_edge = logits > edge, logits == edge
    missing = needed - above.sum(dim=1, keepdim=True)
    chosen = above | (at_edge & (at_edge.cumsum(dim=1) <= missing))
    return kept & (chosen | ~is_cut), unsure


def _noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`decoding.noise.gumbel_noise` of every token, for each of the rows' keys."""
    ids = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=keys.device)[None, :]
    # Sums and products of 64 bits wrap around, with a sign or without.
    z = ids * _signed(GAMMA) + keys
    z = (z ^ _shifted(z, 30)) * _signed(MIX_A)
    z = (z ^ _shifted(z, 27)) * _signed(MIX_B)
    z = z ^ _shifted(z, 31)
    values = (_shifted(z, 12) | 0x3FF0000000000000).view(torch.float64) - (1.0 - 2.0**-53)
    return -torch.log(-torch.log(values))


def _shifted(z: torch.Tensor, count: int) -> torch.Tensor:
    """To the right, filled with zeros."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
