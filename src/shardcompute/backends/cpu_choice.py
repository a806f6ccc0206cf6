"""Choice between ONNX Runtime and llama.cpp on a CPU: a rule over what was measured there. Pure; imports no backend.

What counts is the time of a usual turn, `TURN_ROWS` new tokens of a prompt and as many answered: half of the answer
alone, half as one of eight sessions. llama.cpp is chosen where that takes clearly less, because a model's backend
decides its exactness class (`docs/decisions/0023-backend-by-measurement.md`), and measurements are a little off.
"""

from __future__ import annotations

from dataclasses import dataclass

ONNX, LLAMACPP = "onnx", "llamacpp"
TURN_ROWS = 256
CLEAR_GAIN = 1.1
"""So many times longer ONNX Runtime must take for a turn than llama.cpp."""
_SESSIONS = 8


@dataclass(frozen=True, slots=True)
class CpuSpeed:
    """Seconds of a backend for one row of a session alone, for one row each of eight sessions, and for each row of a
    prompt: all of the model, or the same part of it."""

    row_s: float
    batch_s: float
    prompt_row_s: float

    @property
    def turn_s(self) -> float:
        return TURN_ROWS * (self.prompt_row_s + (self.row_s + self.batch_s / _SESSIONS) / 2)


@dataclass(frozen=True, slots=True)
class CpuBackendChoice:
    """Which backend computes a model on CPUs whose owner left that open, and why, in words."""

    backend: str
    reason: str


def choose_measured(onnx: CpuSpeed, llamacpp: CpuSpeed) -> CpuBackendChoice:
    gain = onnx.turn_s / llamacpp.turn_s
    parts = (
        ("one stream", onnx.row_s / llamacpp.row_s),
        ("eight sessions", onnx.batch_s / llamacpp.batch_s),
        ("prompts", onnx.prompt_row_s / llamacpp.prompt_row_s),
    )
    figures = ", ".join(f"{what} {times:.2f}" for what, times in parts)
    is_chosen = gain >= CLEAR_GAIN
    verdict = "chosen" if is_chosen else f"not chosen below {CLEAR_GAIN:.2f}"
    return CpuBackendChoice(
        LLAMACPP if is_chosen else ONNX,
        f"llama.cpp is {gain:.2f} times as fast as ONNX Runtime here in a usual turn ({figures}), {verdict}",
    )
