"""Prometheus' own opinion of a page of metrics, where its tool is installed."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
_VLLM = re.compile(r"vllm:\w+ metric names should not contain ':'")
_SOUND, _LINTED = 0, 3


def assert_sound(text: str) -> None:
    """It reads every line and finds fault with nothing but the colon in vLLM's names, which are not ours to choose."""
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if line]
    assert not [line for line in complaints if not _VLLM.fullmatch(line)], done.stderr
    assert done.returncode == (_LINTED if complaints else _SOUND), done.stderr
