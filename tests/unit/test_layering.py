"""The import ladder, no imports inside functions, and a report of what is larger than the house style."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "python" / "minisgl"
RANKS = {
    "core": 0, "eviction": 0, "flags": 0, "measured": 0, "text": 1, "config": 1, "resolve": 2, "parallel": 2,
    "attention": 3, "kvcache": 3, "moe": 3, "layers": 4, "models": 5, "engine": 6, "scheduler": 7,
    "planner": 8, "llm": 9, "convert": 9, "server": 10, "generate": 10, "tune": 10, "demo": 11, "cli": 12,
    "__main__": 13, "__init__": 13,
}  # fmt: skip
MAX_FILE, MAX_FUNCTION, MAX_JITTED, MAX_PARAMETERS = 400, 60, 120, 8
FILES = sorted(ROOT.rglob("*.py"))


def subsystem(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported(node: ast.AST) -> list[str]:
    """Subsystems of our own package that an import statement names."""
    names = []
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        names = [node.module]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    return [name.split(".")[1] for name in names if name.startswith("minisgl.")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_lower_never_imports_higher(path: Path) -> None:
    own = subsystem(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for other in imported(node):
            if other != own:
                assert RANKS[other] < RANKS[own], f"line {node.lineno}: {own} imports {other}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_import_of_our_own_inside_a_function(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                assert not imported(node), f"line {node.lineno}: import inside {function.name}"  # type: ignore[attr-defined]


def oversized(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    tree, rows, where = ast.parse(text), [], path.relative_to(ROOT)
    lines = text.count("\n")
    if lines > MAX_FILE:
        rows.append(f"{where}: {lines} lines")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            jitted = any("jit" in ast.unparse(d) for d in node.decorator_list)
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            args = node.args
            parameters = len(args.args) + len(args.kwonlyargs) + len(args.posonlyargs)
            parameters -= bool(args.args) and args.args[0].arg in ("self", "cls")
            if size > (MAX_JITTED if jitted else MAX_FUNCTION):
                rows.append(f"{where}:{node.lineno} {node.name}: {size} lines")
            if parameters > MAX_PARAMETERS and not jitted:
                rows.append(f"{where}:{node.lineno} {node.name}: {parameters} parameters")
    return rows


def test_size_report() -> None:
    """Prints what exceeds the house style. Files, functions and parameter lists may, if the file's docstring says "larger than
    the house style" and why."""
    rows = {path: oversized(path) for path in FILES}
    print(
        "\nlarger than the house style:" if any(rows.values()) else "\nnothing is larger than the house style"
    )
    print("\n".join(row for found in rows.values() for row in found))
    unexplained = []
    for path, found in rows.items():
        docstring = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
        unexplained += found if "larger than the house style" not in docstring.lower() else []
    assert not unexplained
