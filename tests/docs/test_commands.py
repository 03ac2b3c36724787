"""README and docs: every command is run, every key and file that they name is there."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import forked
import pytest
import yaml
from helpers import REPO, gtrain, ok, run, show
from settings_tables import generated

from gtrain.data.config import SCHEMAS

EXAMPLE = REPO / "plugins" / "example_backend"
PAGES = [
    REPO / "README.md",
    REPO / "CHANGELOG.md",
    REPO / "SECURITY.md",
    REPO / "CONTRIBUTING.md",
    REPO / "examples" / "README.md",
    *sorted((REPO / "docs").glob("*.md")),
    EXAMPLE / "README.md",
]
NOT_RUN = 25
"""Blocks of commands that are marked as not run; a new one raises this number, which a reviewer sees."""
MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SETUP = "python3 -m venv .venv && .venv/bin/pip install --quiet {what} && .venv/bin/{command}"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``not_run`` is the reason that the comment above it gives, or None."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.read_text().splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        above = re.fullmatch(r"<!-- not run: (.+) -->", lines[start - 1])
        text = "\n".join(lines[start + 1 : number])
        yield Block(page, start + 1, lines[start][3:], text, above.group(1) if above else None)
        start = None
    assert start is None, f"{page}: the block of line {start} is not closed"


def name(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(REPO).as_posix()


def with_commands() -> list[Path]:
    """Pages with commands that are run."""
    return [page for page in PAGES if any(b.language == "bash" and b.not_run is None for b in blocks(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", with_commands(), ids=name)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    """The blocks of a page, one after the other in one folder, as a reader would try them."""
    if page.name == "dgl.md" and importlib.util.find_spec("dgl") is None:
        pytest.skip("DGL is not installed: pip install 'gtrain[dgl]' (Python 3.11)")
    (tmp_path / "bin").mkdir()
    quick = forked.command(tmp_path / "bin").parent
    path = os.pathsep.join([str(quick), str(Path(sys.executable).parent), os.environ["PATH"]])
    for block in blocks(page):
        if block.language == "bash" and block.not_run is None:
            result = run(
                ["bash", "-euo", "pipefail", "-c", block.text], cwd=tmp_path, env={"PATH": path, **MPI_AS_ROOT}
            )
            assert result.returncode == 0, f"{name(page)}, line {block.line}\n{show(result)}"
            assert "Traceback" not in result.stderr, show(result)


def test_commands_that_are_not_run_are_counted() -> None:
    marked = [block for page in PAGES for block in blocks(page) if block.not_run is not None]
    assert len(marked) == NOT_RUN, [f"{name(block.page)}:{block.line} {block.not_run}" for block in marked]
    comments = sum(page.read_text().count("<!-- not run:") for page in PAGES)
    assert comments == NOT_RUN, "a comment does not stand right above a block"


def test_every_block_has_a_language() -> None:
    known = {"bash", "python", "text", "toml", "yaml"}
    assert {block.language for page in PAGES for block in blocks(page)} <= known


@pytest.mark.slow
def test_the_python_example_runs(tmp_path: Path) -> None:
    (example,) = [block for block in blocks(REPO / "README.md") if block.language == "python"]
    (tmp_path / "example.py").write_text(example.text)
    alone = ok(run([sys.executable, "example.py"], cwd=tmp_path))
    assert "leaked" not in alone.stderr
    lines = [alone.stdout.splitlines()[-1], ok(forked.python("example.py", cwd=tmp_path)).stdout.splitlines()[-1]]
    accuracies = [float(line.removeprefix("validation accuracy ")) for line in lines]
    assert accuracies[0] == accuracies[1] > 0.3, "the same seed gives the same weights; one of 8 classes is 0.125"


@pytest.mark.slow
def test_the_examples_of_the_python_page_run(tmp_path: Path) -> None:
    examples = [block for block in blocks(REPO / "docs" / "python.md") if block.language == "python"]
    assert len(examples) >= 5
    for block in examples:
        (tmp_path / "example.py").write_text(block.text)
        said = ok(forked.python("example.py", cwd=tmp_path)).stdout
        assert said, f"docs/python.md, line {block.line} prints nothing"


# ------------------------------------------------------------------------------------------------- set-up


def test_the_two_commands_of_the_readme() -> None:
    """They are what .ci/run does too: install from the project's own files, run pytest."""
    setups = [block.text for block in blocks(REPO / "README.md") if block.text.startswith("python3 -m venv")]
    main = SETUP.format(what="-e .", command="gtrain")
    tests = SETUP.format(what='-e ".[test]"', command="python -m pytest -q -n 3")
    assert setups == [main, tests]
    ci = (REPO / ".ci" / "run").read_text()
    assert os.access(REPO / ".ci" / "run", os.X_OK)
    assert 'pip install --quiet -e ".[dev]"' in ci and "python -m pytest -q -n 3" in ci
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "gtrain[test,docs,s3,tensorboard,wandb,mlflow,optuna]" in extras["dev"]
    assert [extra for extra in extras["dev"] if extra.startswith(("ruff", "mypy")) and "==" not in extra] == []


def test_the_readme_is_short() -> None:
    assert len((REPO / "README.md").read_text().splitlines()) <= 150


# ------------------------------------------------------------------------------------------------- references


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            if target.startswith("https://"):
                continue
            file = (page.parent / path) if path else page
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if file.is_file() else []
            if not file.exists() or (anchor and anchor not in [h.lower().replace(" ", "-") for h in headings]):
                wrong.append(f"{name(page)}: {target}")
    assert wrong == []


def documented(page: Path) -> set[str]:
    """Words in back quotes in the first column of the page's tables, defaults left out."""
    cells = [line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("|")]
    return {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}


def flat(node: object, prefix: str = "") -> Iterator[str]:
    """Dotted keys of nested mappings."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix


def test_every_key_is_documented(tmp_path: Path) -> None:
    """What --cfg job shows, less the data sources', whose keys are those of their schemas."""
    composed = yaml.safe_load(ok(gtrain("--cfg", "job", "callbacks=early_stopping", cwd=tmp_path)).stdout)
    page = documented(REPO / "docs" / "configuration.md")
    listed = page | {f"model.optimizer{key}" for key in page} | {f"callbacks.early_stopping{key}" for key in page}
    # the making of callbacks and loggers is Lightning's own and not listed key by key
    shown = [key for key in flat(composed) if not key.startswith(("data.", "callbacks.", "logger."))]
    assert [key for key in shown if key not in listed] == []
    keys = {key for key in page if re.fullmatch(r"(trainer|paths|cluster)\.\w+", key)}
    assert keys == {key for key in shown if key.startswith(("trainer.", "paths.", "cluster."))}
    data = documented(REPO / "docs" / "data.md")
    options = {field.name for schema in SCHEMAS.values() for field in fields(schema)} - {"_target_"}
    assert options - data == set()
    headings = re.findall(r"^### (.+)$", (REPO / "docs" / "data.md").read_text(), re.MULTILINE)
    assert set(SCHEMAS) == {name for heading in headings[:-1] for name in heading.split(", ")}


def test_the_tables_of_settings_are_those_of_the_dataclasses() -> None:
    """``python tests/settings_tables.py`` writes them."""
    pages = sorted((REPO / "docs").glob("*.md"))
    differ = [page.name for page in pages if generated(page.name, page.read_text()) != page.read_text()]
    assert differ == []
    assert sum(page.read_text().count("<!-- settings: ") for page in pages) >= 25


def test_the_map_lists_every_file_of_the_core() -> None:
    listed, folder = set(), "gtrain"
    for line in (REPO / "docs" / "map.md").read_text().splitlines():
        if heading := re.match(r"## (gtrain[\w/]*)(,?)|^`(gtrain[\w/]+)`", line):
            folder = "gtrain" if heading.group(2) else heading.group(1) or heading.group(3)
        if line.startswith("| `"):
            listed |= {f"{folder}/{file}" for file in re.findall(r"`([\w/]+\.py)`", line.split("|")[1])}
    files = {f.relative_to(REPO).as_posix() for f in (REPO / "gtrain").rglob("*.py") if f.name != "__init__.py"}
    assert listed == files


def mistakes() -> list[tuple[str, str]]:
    """The table of configuration.md: a command and its answer."""
    rows = (REPO / "docs" / "configuration.md").read_text().partition("## Mistakes")[2].splitlines()
    return [(m.group(1), m.group(2)) for row in rows if (m := re.fullmatch(r"\| `(gtrain [^`]+)` \| (.+) \|", row))]


@pytest.mark.parametrize(("command", "answer"), mistakes(), ids=lambda text: text.partition(" was ")[0])
def test_mistakes_are_answered_as_documented(command: str, answer: str, tmp_path: Path) -> None:
    result = forked.gtrain(*shlex.split(command)[1:], cwd=tmp_path)
    assert result.returncode == 1, show(result)
    said, place = " ".join(result.stderr.split()), 0
    for piece in answer.split(" ... "):
        place = said.find(piece.removesuffix(" ...?"), place)
        assert place >= 0, f"{piece!r} was not said\n{show(result)}"
    assert "Traceback" not in result.stderr, show(result)


def test_the_tutorial_quotes_the_example() -> None:
    """Every line of its blocks stands in the example's files, annotations aside; the last is a sketch of layers."""
    files = [*EXAMPLE.rglob("*.py"), *EXAMPLE.rglob("*.yaml"), EXAMPLE / "pyproject.toml"]
    lines = {plain(line) for file in files for line in file.read_text().splitlines()}
    *quoted, sketch = [
        b for b in blocks(REPO / "docs" / "write-a-backend.md") if b.language in ("python", "yaml", "toml")
    ]
    assert len(quoted) == 6
    ast.parse(sketch.text)
    for block in quoted:
        if block.language == "python":
            ast.parse(block.text)
        missing = [line for line in block.text.splitlines() if plain(line) not in lines]
        assert missing == [], f"line {block.line}"


def plain(line: str) -> str:
    """A line without indentation, comments and annotations."""
    line = re.sub(r"\s+#.*$", "", line).strip()
    return re.sub(r": \w+(?=[,)])|(?<=\)) -> [\w\[\]]+(?=:)", "", line)
