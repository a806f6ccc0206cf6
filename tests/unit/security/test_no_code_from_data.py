"""No line of the program turns bytes that came from elsewhere into code, or gives them to a shell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shardcompute

SOURCES = sorted(Path(shardcompute.__file__).parent.rglob("*.py"))
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "code",
    "codeop",
    "imp",
}
CALLS = {"torch.load", "torch.hub.load", "numpy.load", "np.load", "os.system", "os.popen", "runpy.run_path"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
HARMLESS = {"get_completion_script"}
"""It has an argument that is called like a dangerous one: the name of a shell to write a script for."""
SWITCHES = {"allow_pickle": True, "trust_remote_code": True, "shell": True}


def findings(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name in BUILTINS or name.startswith("pickle."):
                found.append(name)
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", "computed")
                if keyword.arg in SWITCHES and value is not False and name not in HARMLESS:
                    found.append(f"{name}({keyword.arg}={value})")
    return found


def test_nothing_is_executed_that_came_as_data() -> None:
    assert len(SOURCES) > 100
    found = {str(path): findings(path.read_text("utf-8")) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import marshal",
        "torch.load(path)",
        "np.load(path)",
        "np.lib.format.read_array(file, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "subprocess.run(line, shell=True)",
        "eval(text)",
    ],
)
def test_it_would_be_found(source: str) -> None:
    assert findings(source)
