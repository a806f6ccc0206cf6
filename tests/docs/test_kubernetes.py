"""The Kubernetes manifests: valid by Kubernetes' schemas, whole in themselves, and true to the program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from string import Template
from typing import Any

import pytest

from shardcompute.api.app import ROUTES
from shardcompute.cli.main import build_app
from shardcompute.cli.options.cluster import CLUSTER_PORT, JOIN_PORT

yaml = pytest.importorskip("yaml")
typer = pytest.importorskip("typer")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ops" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
OBJECTS: list[dict[str, Any]] = [
    each
    for file in FILES
    if file.name != "kustomization.yaml"
    for each in yaml.safe_load_all(file.read_text())
]
SETS = [each for each in OBJECTS if each["kind"] == "StatefulSet"]


def container(name: str) -> dict[str, Any]:
    found = [pod["containers"][0] for each in SETS if (pod := each["spec"]["template"]["spec"])]
    return next(each for each in found if each["name"] == name)


def test_kustomize_lists_every_file() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert {*listed["resources"], "kustomization.yaml"} == {file.name for file in FILES}
    images = {pod["containers"][0]["image"] for each in SETS if (pod := each["spec"]["template"]["spec"])}
    assert images == {each["name"] for each in listed["images"]}


@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_schemas_of_kubernetes(manifest: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    validate.validate(manifest, "1.31", strict=True)


@pytest.mark.parametrize("each", SETS, ids=lambda each: str(each["metadata"]["name"]))
def test_a_set_fits_together(each: dict[str, Any]) -> None:
    spec = each["spec"]
    pod, labels = spec["template"]["spec"], spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    services = {s["metadata"]["name"]: s for s in OBJECTS if s["kind"] == "Service"}
    assert services[spec["serviceName"]]["spec"]["clusterIP"] == "None"
    [main] = pod["containers"]
    ports = {port["name"] for port in main["ports"]}
    for service in services.values():
        if service["spec"]["selector"] == labels:
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    volumes = {v["name"] for v in pod["volumes"]} | {
        v["metadata"]["name"] for v in spec["volumeClaimTemplates"]
    }
    assert {mount["name"] for mount in main["volumeMounts"]} == volumes
    assert main["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"] is True
    user = re.search(r"useradd --uid (\d+)", (ROOT / "ops/docker/Dockerfile").read_text())
    assert user is not None
    assert pod["securityContext"]["runAsUser"] == int(user[1])


def test_commands_and_options_exist() -> None:
    commands = typer.main.get_command(build_app(["coordinator", "worker"])).commands
    environment = {each["name"]: each.get("value", "10.0.0.7") for each in container("worker")["env"]}
    command = Template(container("worker")["args"][0].partition("<")[0]).substitute(environment)
    worker = shlex.split(command)
    assert worker[:2] == ["exec", "shardcompute"]
    for name, words in (("coordinator", container("coordinator")["args"][1:]), (worker[2], worker[3:])):
        known = {option for parameter in commands[name].params for option in parameter.opts}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known, name
        commands[name].make_context(name, list(words))


def test_probes_ask_what_is_there() -> None:
    paths = {route.path for route in ROUTES}
    for name in ("coordinator", "worker"):
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container(name).get(kind, {})
            if "httpGet" in probe:
                assert probe["httpGet"]["path"] in paths
            elif probe:
                script = Path(probe["exec"]["command"][1]).name
                assert f"ops/docker/{script} " in (ROOT / "ops/docker/Dockerfile").read_text()


def test_ports_are_those_of_the_program() -> None:
    ports = {port["name"]: port["containerPort"] for port in container("coordinator")["ports"]}
    assert ports == {"api": 8000, "links": CLUSTER_PORT, "join": JOIN_PORT}


def test_no_secret_is_among_them() -> None:
    assert not [each for each in OBJECTS if each["kind"] == "Secret"]
    text = "".join(file.read_text() for file in FILES)
    assert not re.search(r"sk-|sc1\.", text)
