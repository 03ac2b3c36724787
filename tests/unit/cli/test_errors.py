"""Every error that a user may meet says what to do about it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from helpers import REPO

KINDS = {"ConfigError", "DataError", "StoreError", "CheckpointError"}


def errors(source: str) -> Iterator[ast.Call]:
    """Yield each construction of one of the errors, whether it is raised there or returned to be raised elsewhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if name in KINDS:
                yield node


def has_hint(call: ast.Call) -> bool:
    """Return whether ``hint=`` is there, and is not plainly empty."""
    values = [keyword.value for keyword in call.keywords if keyword.arg == "hint"]
    return bool(values) and not (isinstance(values[0], ast.Constant) and not values[0].value)


def source_files() -> list[Path]:
    return sorted([*(REPO / "gtrain").rglob("*.py"), *(REPO / "plugins").glob("gtrain_*/**/*.py")])


def test_every_error_has_a_hint() -> None:
    calls = [(file, call) for file in source_files() for call in errors(file.read_text())]
    assert len(calls) > 100
    assert {file.relative_to(REPO).parts[:2] for file, _ in calls} >= {("gtrain", "data"), ("plugins", "gtrain_sar")}
    without = [f"{file.relative_to(REPO)}:{call.lineno}" for file, call in calls if not has_hint(call)]
    assert not without, "errors without a hint:\n" + "\n".join(without)


def test_the_search_finds_what_it_should() -> None:
    source = """
raise DataError("a")
raise errors.StoreError("b", hint=None) from err
def f():
    return ConfigError("c", hint="")
raise ConfigError("d", hint="do it")
raise CheckpointError("e", hint=f"do {it}")
raise ValueError("f")
"""
    assert [has_hint(call) for call in sorted(errors(source), key=lambda call: call.lineno)] == [False] * 3 + [True] * 2
