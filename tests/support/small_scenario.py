"""Small scenarios for tests."""

from __future__ import annotations

from shardcompute.simulator import Scenario, parse_scenarios

SMALL = """
name = "small"
duration_s = 60

[model]
layers = 12
layer_mb = 10
head_mb = 20
embedding_mb = 20
hidden = 256
kv_tokens = 4096
{model}

[[machines]]
count = {count}
memory_gb = 0.07
read_gb_per_s = 10
overhead_ms = 1
row_factor = 0.1
prefill_factor = 0.1
access_ms = 1
{machines}

[network]
noise = 0.0

[control]
open_s = 0.5
calm_tick_s = 2
search_steps = 5
{more}
"""


def small(*, count: int = 4, model: str = "", machines: str = "", more: str = "") -> Scenario:
    """Machines of which three hold the model, on lines of 4 ms there and back."""
    text = SMALL.format(count=count, model=model, machines=machines, more=more)
    return parse_scenarios("small.toml", text)[0]
