"""What operators are given fits the program: metrics that exist, commands that parse, files that are whole."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardcompute.api.metrics.table import all_rows
from support.api.promtool import needs_promtool

yaml = pytest.importorskip("yaml")
OPS = Path(__file__).parents[2] / "ops"
METRIC = re.compile(r"\b(?:shardcompute|vllm)[_:][a-z0-9_]+")


def _known() -> dict[str, set[str]]:
    """Every name that a query may use, with its labels."""
    known: dict[str, set[str]] = {}
    for row in all_rows():
        for name in row.names:
            endings = ("_bucket", "_sum", "_count") if row.kind == "histogram" else ("",)
            known |= {name + ending: set(row.labels) for ending in endings}
    return known


def _expressions(value: Any) -> list[str]:
    """Whatever is a query, at any depth."""
    if isinstance(value, dict):
        here = [value[key] for key in ("expr", "query") if isinstance(value.get(key), str)]
        return here + [each for item in value.values() for each in _expressions(item)]
    return [each for item in value for each in _expressions(item)] if isinstance(value, list) else []


def test_generated_pages_are_fresh() -> None:
    script = OPS.parent / "scripts" / "docs_reference.py"
    done = subprocess.run(
        [sys.executable, "-B", script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


ALERTS = yaml.safe_load((OPS / "alerts.yml").read_text())
DASHBOARD = json.loads((OPS / "grafana.json").read_text())
QUERIES = _expressions(ALERTS) + [query for query in _expressions(DASHBOARD) if query != "prometheus"]


@pytest.mark.parametrize("query", QUERIES)
def test_queries_name_metrics_and_labels_that_exist(query: str) -> None:
    known = _known()
    names = METRIC.findall(query)
    assert names
    assert set(names) <= known.keys()
    labels = set().union(*(known[name] for name in names)) | {"le", "instance", "job"}
    for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        assert {label.strip() for label in grouped.split(",")} <= labels
    for selector in re.findall(r"\{([^}]*)\}", query):
        assert {part.partition("=")[0].strip(" ~!") for part in selector.split(",")} <= labels


def test_every_alert_says_what_to_do_and_where() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert {"summary", "action"} <= rule["annotations"].keys()
        for named in re.findall(r"docs/[\w/-]+\.md", rule["annotations"]["action"]):
            assert (OPS.parent / named).exists()


def test_annotations_name_metrics_that_exist() -> None:
    text = json.dumps(ALERTS)
    histograms = {name for row in all_rows() if row.kind == "histogram" for name in row.names}
    assert set(METRIC.findall(text)) <= _known().keys() | histograms


@needs_promtool
@pytest.mark.parametrize(
    "check",
    [
        ("rules", "alerts.yml"),
        # The key's file that it names is on the machine of Prometheus.
        ("config", "--syntax-only", "prometheus.yml"),
    ],
    ids=lambda check: check[-1],
)
def test_promtool_accepts_the_file(check: tuple[str, ...]) -> None:
    *options, file = check
    done = subprocess.run(
        ["promtool", "check", *options, OPS / file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_have_their_own_ids_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24


def test_compose_is_a_coordinator_and_three_workers() -> None:
    services = yaml.safe_load((OPS / "docker" / "compose.yml").read_text())
    names = services["services"]
    assert [name for name in names if name.startswith("worker-")] == ["worker-1", "worker-2", "worker-3"]
    used = {volume.partition(":")[0] for each in names.values() for volume in each["volumes"]}
    assert used == services["volumes"].keys()
    for each in names.values():
        assert set(each.get("depends_on", {})) <= names.keys()
        assert each["read_only"]
        assert each["cap_drop"] == ["ALL"]
        context = (OPS / "docker" / each["build"]["context"]).resolve()
        assert (context / each["build"]["dockerfile"]).exists()


def test_the_image_is_not_root_and_copies_what_exists() -> None:
    text = (OPS / "docker" / "Dockerfile").read_text()
    lines = text.splitlines()
    assert lines.index("USER shardcompute") < lines.index('ENTRYPOINT ["shardcompute"]')
    assert "HEALTHCHECK" in text
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
    assert all((OPS.parent / source).exists() for sources in copied for source in sources)
    ignored = (OPS / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert all(f"!{source}" in ignored for sources in copied for source in sources)


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
def test_compose_accepts_the_file() -> None:
    has_compose = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if has_compose.returncode:
        pytest.skip("docker has no compose here")
    done = subprocess.run(
        ["docker", "compose", "-f", OPS / "docker" / "compose.yml", "config", "--quiet"],
        env={"SHARDCOMPUTE_API_KEY": "key", "PATH": "/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
