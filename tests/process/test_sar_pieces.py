"""Messages that travel in pieces: exact beside PyG, as with one."""

from __future__ import annotations

import json
from pathlib import Path

from forked import python
from helpers import ok

PROGRAM = Path(__file__).parent.parent / "assets" / "sar_pieces_program.py"
CASES = ["gat", "gat one head", "gat residual", "dropout: gat", "sage mean", "sage of equal width", "sage max", "gcn"]


def test_pieces_of_a_round_come_to_the_same_as_one_message(tmp_path: Path) -> None:
    done = ok(python(str(PROGRAM), str(tmp_path), "--world", "3", "--cases", ";".join(CASES), cwd=tmp_path))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT 3 ")]
    results = json.loads(line.removeprefix("RESULT 3 "))
    assert list(results) == CASES
    for name, modes in results.items():
        assert list(modes) == ["mode 1", "mode 2", "mode 3"], modes
        for figures in modes.values():
            for what, worst in figures.items():
                assert worst <= (1e-6 if what == "finite difference" else 1e-10), f"{name}: {what}"
