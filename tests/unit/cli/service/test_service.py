"""Services: files that managers understand, no secret where others can read it, and clear refusals."""

from __future__ import annotations

import json
import plistlib
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from shardcompute.cli.service import service
from shardcompute.cli.service.service_files import Launchd, Systemd, describe_service, quote_systemd
from shardcompute.cli.service.task_scheduler import TaskScheduler
from shardcompute.core.errors import UsageError
from shardcompute.core.settings import Settings
from support.fake_devices import H200, cuda_machine, pretend, second

Cli = Callable[..., Any]
SECRET = "sk-very-secret"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home on a machine with systemd."""
    folder = tmp_path / "user"
    monkeypatch.setattr(service, "find_system", lambda: Systemd(folder / "units"))
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    called: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        called.append(command)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(service.subprocess, "run", run)
    return called


def test_secrets_stay_out_of_what_others_read(
    cli: Cli, home: Path, user: Path, calls: list[list[str]]
) -> None:
    keys = home / "keys"
    keys.parent.mkdir(exist_ok=True)
    keys.touch(0o600)
    keys.write_text(SECRET)
    installed = cli("service", "install", "up", "--host", "0.0.0.0", "--api-key-file", str(keys))
    assert installed.exit_code == 0
    assert "systemctl --user enable --now shardcompute-up.service" in installed.stderr
    unit = user / "units" / "shardcompute-up.service"
    text = unit.read_text()
    assert '"service" "exec" "up"' in text
    assert [line for line in text.splitlines() if line.startswith("[")] == [
        "[Unit]",
        "[Service]",
        "[Install]",
    ]
    assert f'Environment="SHARDCOMPUTE_HOME={home}"' in text
    holders = [
        path for path in (*home.rglob("*"), *user.rglob("*")) if path.is_file() and SECRET in path.read_text()
    ]
    assert holders == [keys], "nobody copies it"
    kept = home / "services" / "up.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    listed = cli("service", "status")
    assert f"shardcompute up --host 0.0.0.0 --api-key-file {keys}" in " ".join(listed.stdout.split())
    (told,) = json.loads(cli("service", "status", "--json").stdout)
    assert (told["name"], told["is_running"], told["file"]) == ("up", True, str(unit))
    assert SECRET not in installed.output + listed.output + json.dumps(told)
    assert cli("service", "uninstall", "up").exit_code == 0
    assert calls[-1] == ["systemctl", "--user", "disable", "--now", "shardcompute-up.service"]
    assert not unit.exists()
    assert not kept.exists()
    assert cli("service", "uninstall", "up").exit_code == 2
    assert "there is no service" in cli("service", "status").stderr


@pytest.mark.parametrize("where", ["before", "behind"])
def test_print_changes_nothing(cli: Cli, home: Path, user: Path, where: str) -> None:
    arguments = ["--print", "up"] if where == "before" else ["up", "--print"]
    result = cli("service", "install", *arguments, "--require-key")
    assert result.exit_code == 0
    assert result.stdout.startswith("[Unit]\n")
    assert not user.exists()
    assert not (home / "services").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run"], "cannot run as a service"),
        (["up", "--hosst", "x"], "No such option"),
        (["up", "--port", "many"], "as an integer"),
        (["up", "--data-dir", "somewhere"], "depends on where the service is started"),
        (["up", "--api-key-file", "keys"], "depends on where the service is started"),
        (["join"], "no cluster has been joined"),
        (["join", "nonsense"], "unexpected extra argument"),
        (["join", "sc1.nonsense"], "token"),
        (["driver", "nonsense"], "that is no token"),
    ],
)
def test_what_could_not_run_is_not_installed(
    cli: Cli, user: Path, arguments: list[str], complaint: str
) -> None:
    result = cli("service", "install", *arguments)
    assert result.exit_code in (2, 10)
    assert complaint in " ".join(result.stderr.replace("│", " ").split())
    assert not user.exists()


def test_what_was_installed_runs_in_the_same_process(
    cli: Cli, home: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    monkeypatch.setattr("shardcompute.cli.serve.foreground.run_cluster", lambda plan, *_: plans.append(plan))
    cli("service", "install", "up", "--no-workers", "--port", "0", "--require-key")
    assert cli("service", "exec", "up").exit_code == 0
    assert (plans[0].serving.require_key, plans[0].serving.port, plans[0].workers) == (True, 0, None)
    (home / "services" / "up.json").write_text("[")
    assert cli("service", "exec", "up").exit_code == 6
    assert cli("service", "exec", "driver").exit_code == 2


def test_a_token_is_used_at_once_and_not_kept(
    cli: Cli, home: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[Any] = []
    member = SimpleNamespace(
        credentials=SimpleNamespace(
            own=SimpleNamespace(cluster="home"), identity=SimpleNamespace(node_id="n1")
        )
    )

    def join_from(folder: Path, token: str, role: str) -> Any:
        joined.append(([folder], token, role))
        return member

    def join_all_from(folders: list[Path], token: str, *, through: object, evidence: bytes) -> Any:
        joined.append((list(folders), token, "worker"))
        return [member for _ in folders]

    pretend(monkeypatch, cuda_machine(H200, second()))
    monkeypatch.setattr("shardcompute.node.enrolment.stored.join_from", join_from)
    monkeypatch.setattr("shardcompute.node.enrolment.stored.join_all_from", join_all_from)
    monkeypatch.setattr("shardcompute.security.tokens.parse_token", lambda text: text)
    assert cli("service", "install", "join", "sc1.abc", "--name", "box").exit_code == 0
    kept = json.loads((home / "services" / "join.json").read_text())
    assert kept == {"command": "worker", "arguments": ["--name", "box"]}
    assert cli("service", "install", "join", "sc1.abc", "--device", "cpu").exit_code == 0
    assert cli("service", "install", "driver", "sc1.abc").exit_code == 0
    worker = home / "worker"
    assert joined == [
        # Each device on which the service will compute.
        ([worker, worker / "places" / "cuda-1"], "sc1.abc", "worker"),
        ([worker], "sc1.abc", "worker"),
        ([home / "driver"], "sc1.abc", "driver"),
    ]


def test_systems_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(service.find_system("darwin"), Launchd)
    monkeypatch.setattr(service.shutil, "which", lambda name: "/usr/bin/systemctl")
    assert isinstance(service.find_system("linux"), Systemd)
    monkeypatch.setattr(service.shutil, "which", lambda name: None)
    assert isinstance(service.find_system("win32"), TaskScheduler)
    with pytest.raises(UsageError, match="neither systemd nor launchd"):
        service.find_system("linux")


def test_launchd_reads_what_was_meant(tmp_path: Path) -> None:
    system = Launchd(tmp_path, 501)
    settings = Settings(data_dir=tmp_path / 'a "b" & c', offline=True, threads=3)
    told = plistlib.loads(system.render(describe_service("up", settings, ("/opt/<python>",))).encode())
    assert told["ProgramArguments"] == ["/opt/<python>", "service", "exec", "up"]
    assert told["EnvironmentVariables"] == {
        "SHARDCOMPUTE_HOME": str(settings.data_dir),
        "SHARDCOMPUTE_OFFLINE": "1",
        "SHARDCOMPUTE_THREADS": "3",
    }
    assert system.next_steps("up")[0].startswith("launchctl bootstrap gui/501 ")


def test_task_scheduler_reads_what_was_meant(tmp_path: Path) -> None:
    system = TaskScheduler(tmp_path)
    settings = Settings(data_dir=Path('C:/Benutzer/Jörg "x" & co'), offline=True)
    text = system.render(
        describe_service("up", settings, ("C:/Program Files/<python>.exe", "-m", "shardcompute"))
    )
    assert text.isascii()
    task = {element.tag.rpartition("}")[2]: element.text for element in ElementTree.fromstring(text).iter()}
    assert task["Command"] == "C:/Program Files/<python>.exe"
    assert task["Arguments"] == (
        "-m shardcompute service exec up"
        ' --with "SHARDCOMPUTE_HOME=C:/Benutzer/Jörg \\"x\\" & co" --with SHARDCOMPUTE_OFFLINE=1'
    )
    assert task["ExecutionTimeLimit"] == "PT0S", "else it would end after three days"
    assert system.stop_commands("up")[-1] == ["schtasks", "/Delete", "/F", "/TN", "ShardCompute-up"]


def test_an_environment_can_come_with_the_command(
    cli: Cli, home: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    monkeypatch.setattr("shardcompute.cli.serve.foreground.run_cluster", lambda plan, *_: plans.append(plan))
    cli("service", "install", "up", "--no-workers", "--port", "0")
    monkeypatch.setenv("SHARDCOMPUTE_HOME", str(home / "elsewhere"))
    assert cli("service", "exec", "up").exit_code == 2, "nothing was installed there"
    assert cli("service", "exec", "up", "--with", f"SHARDCOMPUTE_HOME={home}").exit_code == 0
    assert len(plans) == 1


def test_units_quote_what_systemd_would_interpret(tmp_path: Path) -> None:
    settings = Settings(data_dir=Path('/data/$HOME 100% "x"\\y'))
    text = Systemd(tmp_path).render(describe_service("up", settings, ("/opt/$x/python",)))
    assert 'Environment="SHARDCOMPUTE_HOME=/data/$HOME 100%% \\"x\\"\\\\y"' in text
    assert 'ExecStart="/opt/$$x/python" "service"' in text
    with pytest.raises(UsageError, match="unit file"):
        quote_systemd("two\nlines")
