"""What ``gtrain score`` and ``gtrain neighbors`` take as ``key=value``. Light: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from gtrain.settings import setting


@dataclass(frozen=True)
class Options:
    """What both commands take as ``key=value``."""

    run: str = setting("", "folder of the run, or `last`; needed")
    ckpt_path: str | None = setting(None, "`best`, `last` or the folder of a checkpoint; null: the best one")
    store: str | None = setting(None, "folder of the store, which has the names; null: where the run had it")
    k: int = setting(10, "answers to each question")
    format: str = setting("tsv", "`tsv`: a line per answer; `json`: an object per question")
    input: str | None = setting(None, "file with a question or name on each line; `-`: standard input")


@dataclass(frozen=True)
class ScoreOptions(Options):
    """What ``gtrain score`` takes."""

    filtered: bool = setting(False, "whether edges of the data are left out of the answers")


@dataclass(frozen=True)
class NeighborOptions(Options):
    """What ``gtrain neighbors`` takes."""

    type: str | None = setting(None, "entity type of the names; null: the one that has them")
    metric: str | None = setting(None, "`cos`, `l2` or `dot`; null: follows from operator and comparator")
    index: str | None = setting(
        None, "file of an approximate index, which is built if it does not exist; null: the search is exact"
    )
