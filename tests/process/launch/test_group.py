"""A group of ranks that is formed again, without torch's default group."""

from __future__ import annotations

import json
from pathlib import Path

import forked
from helpers import REPO, ok

PROGRAM = REPO / "tests" / "assets" / "group_program.py"


def test_a_group_survives_members_that_die_come_back_and_leave(tmp_path: Path) -> None:
    done = ok(forked.python(str(PROGRAM), cwd=tmp_path))
    result = json.loads(done.stdout.split("RESULT ")[1])
    assert result["sums"] == [111.0, 111e3, 101e6]  # all three, all three again, without rank 1
    assert result["gathered"] == [[0, 0], [1, 1], [2, 1]]  # rank and life
    assert result["word"] == "said by 0"
    assert result["place"] == [0, 2]
    assert done.stderr.count("restarting it (1/1)") == 2
