"""Template variables of a request: its own, within bounds, and those by which templates know how much to think."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from shardcompute.api.errors import RequestError
from shardcompute.api.tools.harmony import is_harmony

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_VARIABLES = 64
MAX_VARIABLES_CHARS = 1 << 14
MAX_DEPTH = 8
PARAM = "chat_template_kwargs"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
    | {"raise_exception", "strftime_now", "tokenize", "return_dict"}
    | {"range", "namespace", "dict", "lipsum", "cycler", "joiner", "loop", "self", "super", "caller"}
)
"""What the server gives templates itself, or Jinja does."""
_SWITCHES = ("enable_thinking", "thinking")
"""By these templates know whether to think; those that know neither always or never do."""
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Models that write channels were taught three efforts."""


def template_variables(
    template: str | None, given: Mapping[str, Any] | None, effort: Effort | None, thinks: bool | None = None
) -> dict[str, Any]:
    """What the template is told besides the conversation. What is `given` by name is stronger than what an effort, or
    `thinks`, comes to."""
    variables: dict[str, Any] = {}
    source = template or ""
    if effort is not None:
        variables["reasoning_effort"] = (
            _HARMONY_EFFORTS.get(effort, effort) if is_harmony(template) else effort
        )
        thinks = effort not in ("none", "minimal") if thinks is None else thinks
    if thinks is not None:
        variables |= {name: thinks for name in _SWITCHES if re.search(rf"\b{name}\b", source)}
    return {**variables, **_checked(given or {})}


def _checked(given: Mapping[str, Any]) -> Mapping[str, Any]:
    if len(given) > MAX_VARIABLES:
        raise _refused(f"has {len(given)} variables, more than {MAX_VARIABLES}")
    for name, value in given.items():
        if not _NAME.fullmatch(name) or name.startswith("__"):
            raise _refused(f"has a variable {name[:64]!r}, which is no name")
        if name in _RESERVED or name.endswith("_token"):
            raise _refused(f"cannot set {name!r}, which the server gives the template itself")
        if _depth(value) > MAX_DEPTH:
            raise _refused(f"has more than {MAX_DEPTH} levels in {name!r}")
    size = len(json.dumps(given))
    if size > MAX_VARIABLES_CHARS:
        raise _refused(f"has {size} characters, more than {MAX_VARIABLES_CHARS}")
    return given


def _depth(value: object) -> int:
    """Levels of a value, counted only as far as they matter."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def _refused(why: str) -> RequestError:
    hint = "send only variables of the model's chat template, such as enable_thinking"
    return RequestError(f"{PARAM} {why}.", hint=hint, param=PARAM, code="invalid_value")
