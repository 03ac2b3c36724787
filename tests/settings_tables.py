"""Tables of settings in the pages, written from the dataclasses that declare them: ``python tests/settings_tables.py``.

A table stands between ``<!-- settings: TOPIC [NAME ...] -->`` and ``<!-- end of settings -->``. The topic is a group
such as ``trainer``, or ``GROUP=OPTION``; names choose some of its settings. Of an option of ``data`` the table has the
settings that it declares itself, or changes, with bare names.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtrain.cli.explain import JOB, declared
from gtrain.config import StrategyConfig
from gtrain.data.config import DataConfig
from gtrain.settings import as_typed, default_of

DOCS = Path(__file__).resolve().parents[1] / "docs"
_TABLE = re.compile(r"(<!-- settings: ([^\n]+) -->\n)(.*?)(<!-- end of settings -->)", re.DOTALL)


def generated(page: str, text: str) -> str:
    """The text of a page with its tables as the dataclasses say.

    Args:
        page: the name of its file.
        text: as it stands.
    """
    return _TABLE.sub(lambda match: f"{match[1]}{table(page, *match[2].split())}{match[4]}", text)


def table(page: str, topic: str, *names: str) -> str:
    """The table of a topic, lines with their ends."""
    rows = [f"| `{key}` | {default} | {meaning} |" for key, default, meaning in _rows(page, topic, names)]
    return "\n".join(["", "| key | default | meaning |", "| --- | --- | --- |", *rows, "", ""])


def _rows(page: str, topic: str, names: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    group, _, option = topic.partition("=")
    if topic in ("data", "strategy"):
        owner: type[Any] = {"data": DataConfig, "strategy": StrategyConfig}[topic]
        base: type[Any] = object
    else:
        owner = declared()[group][option]
        base = {"data": DataConfig, "strategy": StrategyConfig}.get(group, object)
    prefix = "" if group in (JOB, "data", "machine") else f"{group}."
    shared = {field.name: field for field in dataclasses.fields(base)} if dataclasses.is_dataclass(base) else {}
    for field in dataclasses.fields(owner):
        inherited = shared.get(field.name)
        if field.name == "_target_" or (names and field.name not in names):
            continue
        if inherited is None or field.metadata["help"] != inherited.metadata["help"]:
            yield f"{prefix}{field.name}", _default(field), _meaning(page, field)
        elif _default(field) != _default(inherited):
            yield (
                f"{prefix}{field.name}",
                _default(field),
                "of [all sources](data.md#keys-of-all-sources)".replace(f"]({page}#", "](#"),
            )


def _default(field: dataclasses.Field[Any]) -> str:
    default = default_of(field)
    if default == "???":
        return "must be set"
    text = as_typed(default)
    return f"`{text}`" if text and not text.startswith("#") else f'`"{text}"`'


def _meaning(page: str, field: dataclasses.Field[Any]) -> str:
    declared = field.metadata
    text = declared["help"].replace(f"]({page}#", "](#")
    if isinstance(declared["words"], dict):
        text += ". " + "; ".join(f"`{as_typed(word)}`: {what}" for word, what in declared["words"].items())
    elif declared["words"]:
        text += ": " + ", ".join(f"`{as_typed(word)}`" for word in declared["words"])
    return text.replace("|", "\\|")


def main() -> None:
    """Write the tables of all pages."""
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(generated(path.name, path.read_text()))


if __name__ == "__main__":
    sys.exit(main())
