"""The record of a run, and the pages that ``gtrain report`` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import browser
import forked
import numpy as np
import pytest
from helpers import ok, summary

from gtrain.record.run import RunRecord
from gtrain.reporting.scores import score_counts

SAR = ("strategy=sar", "mode=2", "trainer.num_nodes=2", "data.num_nodes=600", "data.num_edges=4000")


def test_the_record_has_the_sums_of_the_summary(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ok(forked.gtrain(*SAR, "trainer.max_epochs=3", f"hydra.run.dir={run}", cwd=tmp_path))
    record, total = RunRecord(run), summary(run)
    assert record.status == "complete" and [event["event"] for event in record.events] == ["start", "end"]
    assert [process.label for process in record.processes] == ["rank 0", "rank 1"]
    for process, rank in zip(record.ranks, total["ranks"], strict=True):
        assert [row["epoch"] for row in process.epochs] == [0, 1, 2]
        for key in ("bytes_sent", "bytes_received"):
            assert sum(row[key] for row in process.epochs) == rank[key] > 0
        assert sum(row["bound"] for row in process.epochs) == rank["comm_bound_bytes"] > 0
        for key in ("wait_seconds", "comm_seconds", "cpu_seconds"):
            assert sum(row[key] for row in process.epochs) == pytest.approx(rank[key], abs=1e-6)
        for row in process.epochs:
            parts = [row[part] for part in ("computing", "sending", "waiting", "reading")]
            assert min(parts) >= 0 and sum(parts) == pytest.approx(row["seconds"], rel=1e-6)
    assert [row["seconds"] for row in record.ranks[0].epochs] == total["epoch_seconds"]
    assert record.history[-1]["val/acc"] == total["history"][-1]["val/acc"]
    confusion = np.sum([test["counts"]["confusion"] for test in record.tests], axis=0)
    assert np.trace(confusion) / confusion.sum() == pytest.approx(total["metrics"]["test/acc"])
    areas = []
    for counts in score_counts(record):
        true, false = counts.positive, counts.negative
        areas.append(((np.cumsum(false) - false / 2) * true).sum() / true.sum() / false.sum())
    assert np.mean(areas) == pytest.approx(total["metrics"]["test/auc"], abs=2e-3)  # the bins are narrow


def test_a_failed_run_has_a_record_of_its_first_cause(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lr = "model.optimizer.lr=1e38"  # the loss of the second epoch is not finite
    failed = forked.gtrain(*SAR, "trainer.max_epochs=9", lr, f"hydra.run.dir={run}", cwd=tmp_path)
    assert failed.returncode == 1
    record = RunRecord(run)
    assert record.status == "failed" and record.summary is None
    assert record.end["message"].startswith("the training loss of epoch")
    assert record.cause["process"] in ("rank 0", "rank 1") and "DataError" in record.cause["message"]
    assert [len(process.of("failure")) for process in record.ranks] == [1, 1]
    refused = tmp_path / "refused"
    forked.gtrain(*SAR, "model=kg", f"hydra.run.dir={refused}", cwd=tmp_path)
    assert RunRecord(refused).status == "refused" and RunRecord(refused).processes == []


STRATEGIES = {
    "single": ("strategy=single", "trainer.max_epochs=3"),
    "sar": (*SAR, "trainer.max_epochs=3"),
    "pyg": ("strategy=pyg", "trainer.num_nodes=2", "data.batch_size=500", "trainer.max_epochs=2"),
    "ps": ("strategy=ps", "trainer.num_nodes=2", "data=planted_sparse", "model=sparse", "trainer.max_epochs=2"),
    "pbg": ("strategy=pbg", "strategy.num_partitions=2", "data=planted_kg", "model=kg", "trainer.max_epochs=2"),
}


@pytest.mark.slow
@pytest.mark.skipif(browser.COMMAND is None, reason="no Chromium is in the PATH (Debian: apt-get install chromium)")
def test_pages_show_the_numbers_of_the_summary(tmp_path: Path) -> None:
    """The page of a run of each strategy, in a browser without a network, on a wide and on a narrow screen."""
    for name, settings in STRATEGIES.items():
        ok(forked.gtrain(*settings, "report=true", f"hydra.run.dir={tmp_path / name}", cwd=tmp_path))
    with browser.browser(tmp_path / "profile") as page:
        for name in STRATEGIES:
            total, path = summary(tmp_path / name), tmp_path / name / "report.html"
            assert path.stat().st_size < 6e6
            figures = list((tmp_path / name / "report-figures").glob("*.svg"))
            for width in (1280, 400):
                page.open(path, width)
                assert page.value("document.documentElement.scrollWidth") <= width, "nothing is wider than the screen"
                assert page.value("document.body.dataset.drawn") == str(len(figures))
                drawn = "[...document.querySelectorAll('.chart svg')].map((svg) => svg.getBoundingClientRect().width)"
                widths = page.value(drawn)
                assert len(widths) == len(figures) >= 8 and 0 < max(widths) <= width
                shown = page.value(
                    "Object.fromEntries([...document.querySelectorAll('#metrics td[data-metric]')]"
                    ".map((cell) => [cell.dataset.metric, [cell.dataset.value, cell.textContent]]))"
                )
                for metric, value in total["metrics"].items():
                    assert shown[metric] == [str(value), f"{value:.4f}"]
                ranks = page.value(
                    "[...document.querySelectorAll('#ranks tbody tr')].map((row) => Object.fromEntries("
                    "[...row.querySelectorAll('td')].map((cell) => [cell.dataset.key, cell.dataset.value])))"
                )
                assert len(ranks) == len(total["ranks"])
                for cells, rank in zip(ranks, total["ranks"], strict=True):
                    assert {key: json.loads(value or "null") for key, value in cells.items()} == {
                        key: rank[key] for key in cells
                    }
        assert all(address.startswith("file://") for address in page.requested)


@pytest.mark.slow
@pytest.mark.skipif(browser.COMMAND is None, reason="no Chromium is in the PATH (Debian: apt-get install chromium)")
def test_pages_of_a_failed_run_and_of_a_sweep(tmp_path: Path) -> None:
    lr = "model.optimizer.lr=1e38"
    assert forked.gtrain(*SAR, lr, "report=true", "hydra.run.dir=failed", cwd=tmp_path).returncode == 1
    settings = ("data.num_nodes=600", "data.num_edges=4000", "trainer.max_epochs=2", "report=true")
    summaries = forked.sweep(tmp_path / "sweep", "strategy=single,sar", *settings)
    with browser.browser(tmp_path / "profile") as page:
        page.open(tmp_path / "failed" / "report.html", 400)
        assert page.value("document.documentElement.scrollWidth") <= 400
        assert page.value("document.querySelector('h1 .status').textContent") == "failed"
        assert page.value("document.querySelector('#cause').textContent").startswith("the training loss of epoch")
        assert page.value("document.querySelector('#failed-process').textContent") in ("rank 0", "rank 1")
        assert "DataError" in page.value("document.querySelector('#failure pre').textContent")
        assert page.value("document.querySelector('#figure-timeline svg') !== null")
        page.open(tmp_path / "sweep" / "report.html", 1280)
        assert page.value("document.documentElement.scrollWidth") <= 1280
        rows = page.value(
            "[...document.querySelectorAll('#comparison tbody tr')].map((row) => [row.querySelector('th').textContent,"
            "row.querySelector('[data-metric=\"test/acc\"]').dataset.value])"
        )
        expected = [(each["strategy"], str(each["metrics"]["test/acc"])) for each in summaries]
        assert [tuple(row) for row in rows] == expected and len(rows) == 2
        assert (tmp_path / "sweep" / "0" / "report.html").is_file()
