"""Reports of a process to its agent: those of several threads do not mix."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gtrain.backends import WORKER
from gtrain.launch import slot


def test_long_reports_of_several_threads_are_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe takes 4,096 bytes at once; a longer line that it takes in part is written on."""
    read_end, write_end = os.pipe()
    context = slot.JobContext(1, 1, Path("logs"), slot=slot.Slot(WORKER, 0, 0, 0), store_fds=(), report_fd=write_end)
    monkeypatch.setattr(slot, "_context", context)
    texts = [str(number) * 50_000 for number in range(4)]
    with ThreadPoolExecutor(5) as pool, open(read_end) as pipe:
        lines = pool.submit(lambda: [json.loads(next(pipe)) for _ in range(40)])
        for done in [pool.submit(slot.report, "say", text=text) for text in texts for _ in range(10)]:
            done.result()
        os.close(write_end)
        assert sorted(line["text"] for line in lines.result()) == sorted(texts * 10)
