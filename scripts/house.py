"""Checks the house: class names used twice, folders too full to read, equal lines, folders that import each other.

Lists what it finds and fails if that is anything. What may stay is in `ALLOWED`, with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
MOST_FILES = 15
LEAST_LINES = 8
ALLOWED: Mapping[str, str] = {
    "shardcompute/backends/torch/kernels/attention.py:": "parameters of Triton kernels cannot be shared",
}
"""The beginning of a finding, and why it may stay."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: str
    tree: ast.Module
    lines: Sequence[str]


def main() -> int:
    files = [_read(path) for path in sorted(SOURCES.rglob("*.py"))]
    findings = [
        *twice_named(files),
        *full_folders(ROOT / "src", ROOT / "tests"),
        *equal_runs(files),
        *import_cycles(files),
    ]
    unexpected = [each for each in findings if not any(each.startswith(start) for start in ALLOWED)]
    stale = [start for start in ALLOWED if not any(each.startswith(start) for each in findings)]
    for each in unexpected:
        print(each)
    for start in stale:
        print(f"allowed, but not found any more: {start}")
    print(f"house: {len(files)} files, {len(unexpected)} findings, {len(ALLOWED)} allowed")
    return 1 if unexpected or stale else 0


def twice_named(files: Sequence[SourceFile]) -> Iterator[str]:
    """One name, one thing: no class name in two modules."""
    homes: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(file.path)
    for name, paths in sorted(homes.items()):
        if len(paths) > 1:
            yield f"class {name} is in {', '.join(paths)}"


def full_folders(*roots: Path) -> Iterator[str]:
    for root in roots:
        for folder in sorted({path.parent for path in root.rglob("*.py")}):
            count = sum(1 for path in folder.glob("*.py") if path.name != "__init__.py")
            if count > MOST_FILES:
                yield f"folder {folder.relative_to(ROOT)} has {count} files"


def equal_runs(files: Sequence[SourceFile]) -> Iterator[str]:
    """Places that share `LEAST_LINES` or more lines of code to the letter."""
    code = {file.path: list(_code_lines(file)) for file in files}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path, lines in code.items():
        for start in range(len(lines) - LEAST_LINES + 1):
            window = tuple(text for _, text in lines[start : start + LEAST_LINES])
            places[window].append((path, start))
    seen: set[tuple[str, int, str, int]] = set()
    for found in places.values():
        for (a, i), (b, j) in combinations(found, 2):
            if (a, i - 1, b, j - 1) not in seen:
                count = _run_length(code[a], i, code[b], j)
                yield f"{a}:{code[a][i][0]} and {b}:{code[b][j][0]} share {count} lines"
            seen.add((a, i, b, j))


def import_cycles(files: Sequence[SourceFile]) -> Iterator[str]:
    """Two folders of one parent that import each other."""
    modules = {_module(file.path) for file in files}
    uses: dict[str, set[str]] = defaultdict(set)
    for file in files:
        folder = str(Path(file.path).parent).replace("/", ".")
        for name in _imports(file.tree, modules):
            uses[folder].add(name if _is_package(name, modules) else name.rpartition(".")[0])
    for a, b in combinations(sorted(uses), 2):
        if b in uses[a] and a in uses[b] and not b.startswith(a + "."):
            yield f"folders {a} and {b} import each other"


def _read(path: Path) -> SourceFile:
    text = path.read_text()
    return SourceFile(str(path.relative_to(SOURCES)), ast.parse(text), text.splitlines())


def _code_lines(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Lines that say something: no imports, strings of their own, comments, lone punctuation."""
    silent: set[int] = set()
    for node in ast.walk(file.tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            silent.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(file.lines, 1):
        text = line.strip()
        if number not in silent and any(c.isalnum() for c in text) and not text.startswith("#"):
            yield number, text


def _run_length(a: Sequence[tuple[int, str]], i: int, b: Sequence[tuple[int, str]], j: int) -> int:
    count = 0
    while i + count < len(a) and j + count < len(b) and a[i + count][1] == b[j + count][1]:
        count += 1
    return count


def _module(path: str) -> str:
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def _is_package(name: str, modules: set[str]) -> bool:
    return (SOURCES / name.replace(".", "/")).is_dir() and name in modules


def _imports(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in modules or node.module in modules:
                    yield full if full in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)


if __name__ == "__main__":
    sys.exit(main())
