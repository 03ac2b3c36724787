"""Every convolution over 1 to 4 ranks beside PyG on the whole graph; run by tests/process/sar/test_convs.py.

sar_conv_program.py FOLDER [--world 1,2,3,4] [--mode 1,2,3] [--cases turns|all|listed|beyond|checks|"NAME;.."] [--force]

With ``turns`` each listed case is run over each number of ranks and in each mode, with ``all`` in most of both.

Prints one JSON line for each world size: {case: {"mode 1": {what: worst relative difference}}}; a string in place of
the figures is an exception, "refused" and "broke" in place of the modes say why there are none.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import sar_conv_cases as cases
import torch
from sar_conv_bench import Bench
from sar_conv_checks import Dropping, far_from_zero, traffic
from sar_conv_graphs import stored

from gtrain import run_local
from gtrain.errors import GtrainError
from gtrain.launch import (
    preload,  # noqa: F401 - once, for all the ranks
    slot,
)
from gtrain.launch.environment import find_environment
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import form_group

SILENT = " (silent)"
MODES = {1: [1], 2: [3], 3: [1, 2], 4: [1, 3]}
"""Modes by the world size where all cases are run; the checks are made in all."""
Plan = list[tuple[str, list[int]]]
"""Cases and their modes."""


def merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst over ranks of each figure; a rank's exception instead of figures."""
    result: dict[str, Any] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        words = [value for value in values if isinstance(value, str)]
        names = {what: 0.0 for value in values if isinstance(value, dict) for what in value}
        result[key] = words[0] if words else {what: max(value.get(what, 0.0) for value in values) for what in names}
    return result


def task(folder: str, size: int, plan: Plan, force: bool, patience: float) -> None:
    """A rank: runs the cases and has rank 0 write each result as a line of ``results-SIZE.jsonl``."""
    torch.set_num_threads(1)
    rank = slot.current().slot.rank
    group = form_group(find_environment(), rank, size, patience, Counters())
    benches: dict[bool, Bench] = {}
    for name, modes in plan:
        plain, silent = name.removesuffix(SILENT), name.endswith(SILENT)
        if silent not in benches:
            benches[silent] = Bench(group, stored(Path(folder), group, silent))
        result = check(benches[silent], plain, modes, force)
        everyone = group.all_gather_object(result)
        if rank == 0:
            with open(f"{folder}/results-{size}.jsonl", "a") as lines:
                lines.write(json.dumps([name, merged(everyone)]) + "\n")


def check(bench: Bench, name: str, modes: list[int], force: bool) -> dict[str, Any]:
    kind, _, rest = name.partition(": ")
    if kind == "dropout":
        return Dropping(bench, cases.DROPPING[rest]).run([1, 2, 3])
    if kind == "traffic":
        return traffic(bench, *cases.TRAFFIC[rest], [1, 2, 3])
    if name == "batch norm":
        return far_from_zero(bench)
    return bench.run((cases.LISTED | cases.BEYOND)[name], modes, force)


def world(folder: str, size: int, plan: Plan, *settings: Any) -> dict[str, Any]:
    """Results of all cases; a case at which a group broke is left out, and a new group goes on behind it."""
    path = Path(folder) / f"results-{size}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    found: dict[str, Any] = {}
    while len(found) < len(plan):
        try:
            run_local(
                task, folder, size, plan[len(found) :], *settings, num_nodes=size, log_dir=f"{folder}/logs-{size}"
            )
            broke = ""
        except GtrainError as error:
            broke = str(error)
        found |= dict(json.loads(line) for line in path.read_text().splitlines())
        if broke:
            found[plan[len(found)][0]] = {"broke": broke}
    return found


def chosen(words: str, size: int, modes: list[int]) -> Plan:
    """The cases of a word, or those named, separated by semicolons, in some modes; the first two words choose both.

    In turns, a case has another mode over each number of ranks above one, and each case of those that follow one
    another in the list, which are of a kind, has another mode there. What nobody promised has the two that differ most.
    """
    listed, beyond = list(cases.LISTED), list(cases.BEYOND)
    checks = [f"dropout: {name}" for name in cases.DROPPING] + [f"traffic: {name}" for name in cases.TRAFFIC]
    known = {"listed": listed, "beyond": beyond, "checks": [*checks, "batch norm"]}
    known["silent"], known["silent beyond"] = ([name + SILENT for name in names] for names in (listed, beyond))
    if words == "all":
        plan = {1: ["listed"], 2: ["listed"], 3: ["listed", "checks"], 4: ["silent", "silent beyond"]}
        some = [mode for mode in modes if mode in MODES[size]]
        return [(name, some) for part in plan[size] for name in known[part]]
    if words == "turns":
        part = known["silent" if size == 4 else "listed"]
        turns = [(name, [1 + (i + size) % 3 if size > 1 else 1]) for i, name in enumerate(part)]
        more = {2: [(name, [3]) for name in beyond], 4: [(name, [1]) for name in known["silent beyond"]]}
        return turns + more.get(size, []) + [(name, modes) for name in known["checks"] if size == 3]
    return [(name, modes) for name in known.get(words, words.split(";"))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--world", default="1,2,3,4")
    parser.add_argument("--mode", default="1,2,3")
    parser.add_argument("--cases", default="all")
    parser.add_argument("--force", action="store_true", help="run what is refused")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds a rank waits for another")
    options = parser.parse_args()
    modes = [int(mode) for mode in options.mode.split(",")]
    for case in (cases.LISTED | cases.BEYOND).values():
        case.make()  # PyG writes code for each class of convolutions, which the ranks then have
    gc.collect()
    gc.freeze()  # or each rank would look for garbage among all that was imported, again and again
    for size in map(int, options.world.split(",")):
        found = world(options.folder, size, chosen(options.cases, size, modes), options.force, options.patience)
        print("RESULT", size, json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
