"""strategy=pyg beside one process: exact where every neighbour is used, the same batches wherever they are sampled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from forked import gtrain
from helpers import REPO, ok, summary

SMALL = ["data.num_nodes=300", "data.num_edges=3000", "data.num_features=12", "data.num_classes=4"]
QUIET = ["callbacks=none", "logger=none", "trainer.limit_test_batches=0", "trainer.max_epochs=3"]
EXACT = ["model.dropout=0.5", "trainer.precision=64-true"]
WHOLE = ["strategy=pyg", "data.num_neighbors=[-1,-1]", "strategy.seeds=global"]
Runner = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def sweep(tmp_path: Path) -> Runner:
    """Runs a sweep and returns the summaries of its jobs in order."""

    def run(*overrides: str, name: str) -> list[dict[str, Any]]:
        return forked.sweep(tmp_path / name, *QUIET, *overrides)

    return run


def losses(run: dict[str, Any]) -> list[float]:
    """Training and validation loss of each epoch."""
    return [entry[name] for entry in run["history"] for name in ("train/loss", "val/loss")]


@pytest.mark.slow
def test_with_every_neighbour_it_trains_what_one_process_trains(sweep: Runner) -> None:
    """Steps of 64 seeds: the same seeds in each step, whatever the ranks and the model."""
    shared = [*SMALL, *EXACT, "data.batch_size=64", "model=gcn,sage,gat", "trainer.max_epochs=2"]
    expected = sweep("strategy=single", "data.num_neighbors=null", *shared, name="single")
    found = sweep(*WHOLE, "strategy.transport=tcp", "trainer.num_nodes=3", *shared, name="pyg")
    assert [run["model"] for run in found] == [run["model"] for run in expected] == ["gcn", "sage", "gat"]
    for alone, run in zip(expected, found, strict=True):
        assert losses(run) == pytest.approx(losses(alone), rel=1e-10)


def test_exact_evaluation_of_a_model_trained_on_samples_is_the_whole_graphs(tmp_path: Path) -> None:
    """In one process, and layer by layer over ranks (strategy=sar), with the same weights and running statistics."""
    model = ["model=gcn", "model.norm=batch", *SMALL, *EXACT, "logger=none"]
    ways = ["strategy=pyg", "strategy.transport=tcp", "strategy.evaluation=exact", "data.num_neighbors=[4,3]"]
    ok(gtrain(*ways, *model, "data.batch_size=64", "trainer.max_epochs=2", "hydra.run.dir=sampled", cwd=tmp_path))
    sampled = summary(tmp_path / "sampled")["metrics"]
    trained = "ckpt_path=sampled/checkpoints/best.ckpt"
    for strategy, *ranks in (["single"], ["sar", "trainer.num_nodes=2"]):
        where = ["hydra.run.dir=" + strategy, *ranks]
        ok(gtrain("test", "strategy=" + strategy, *model, trained, *where, cwd=tmp_path))
        whole = summary(tmp_path / strategy)["metrics"]
        for name in ("test/loss", "test/acc"):
            assert sampled[name] == pytest.approx(whole[name], rel=1e-10)


@pytest.mark.slow
def test_what_is_sampled_depends_on_no_transport_halo_or_thread(sweep: Runner) -> None:
    """Nor on what is made ahead, cached or trimmed. Bytes do: with ``shm`` only gradients and metrics travel."""
    arguments = ["strategy=pyg", *SMALL, *EXACT, "data.batch_size=64", "data.num_neighbors=[4,3]", "model=sage"]
    arguments += ["trainer.num_nodes=2", "trainer.max_epochs=2"]
    found = sweep(*arguments, "strategy.transport=shm,tcp", name="ways")
    received = [[rank["bytes_received"] for rank in run["ranks"]] for run in found]
    assert min(received[1]) > max(received[0]) > 0
    more = ["strategy.transport=tcp", "strategy.threads=3", "strategy.cache_bytes=5000"]
    found += sweep(*arguments, *more, "strategy.halo_hops=1,all", name="more")
    found += sweep(*arguments, "strategy.prefetch=0", "strategy.trim=false", name="plain")
    assert len(found) == 5
    for run in found[1:]:
        assert losses(run) == pytest.approx(losses(found[0]), rel=1e-12)


@pytest.mark.slow
def test_ranks_without_seeds_take_every_step(sweep: Runner, tmp_path: Path) -> None:
    """Only the first half of a graph of two halves has training nodes."""
    edges = [(i, i + 1) for i in range(9)] + [(i, i + 1) for i in range(10, 19)]
    (tmp_path / "edges.tsv").write_text("".join(f"{a}\t{b}\n{b}\t{a}\n" for a, b in edges))
    (tmp_path / "features.tsv").write_text("".join(f"{i % 3}\t{i % 5}\n" for i in range(20)))
    (tmp_path / "labels.txt").write_text("".join(f"{i % 2}\n" for i in range(20)))
    (tmp_path / "parts.txt").write_text("".join(f"{i // 10}\n" for i in range(20)))
    data = ["data=edges", f"data.path={tmp_path}/edges.tsv", f"data.features={tmp_path}/features.tsv"]
    data += [f"data.labels={tmp_path}/labels.txt", "data.train_fraction=0.1", "data.batch_size=2", *EXACT, "model=sage"]
    parts = ["data.partitioner=file", f"data.partition_path={tmp_path}/parts.txt", "trainer.num_nodes=2"]
    (single,) = sweep("strategy=single", *data, "data.num_neighbors=null", name="single")
    (found,) = sweep(*WHOLE, *data, *parts, name="global")
    assert losses(found) == pytest.approx(losses(single), rel=1e-10)
    (local,) = sweep("strategy=pyg", "data.num_neighbors=[-1,-1]", *data, *parts, name="local")
    assert local["world_size"] == 2 and all(rank["cpu_seconds"] > 0 for rank in local["ranks"])
    assert all(0 < loss < 10 for loss in losses(local))


@pytest.mark.slow
def test_a_rank_killed_in_an_epoch_is_named_and_the_run_goes_on_in_the_middle_of_it(tmp_path: Path) -> None:
    """The batches are those of an undisturbed run, and so are the losses, dropout included.

    And so are the running statistics, which are the same on all ranks.
    """
    watch = "+callbacks.watch={_target_:pyg_watch.Watch,folder:%s%s}"
    often = "+callbacks.often={_target_:lightning.pytorch.callbacks.ModelCheckpoint,every_n_train_steps:2,dirpath:%s}"
    arguments = ["strategy=pyg", *SMALL, *QUIET, "data.batch_size=16", "trainer.num_nodes=2", "model=sage"]
    arguments += ["model.norm=batch"]
    env = {"PYTHONPATH": str(REPO / "tests" / "assets")}
    ok(gtrain(*arguments, watch % ("whole", ""), cwd=tmp_path, env=env))
    one, other = (read_lines(tmp_path / "whole", rank) for rank in range(2))
    assert [line.split()[-1] for line in one] == [line.split()[-1] for line in other]
    for transport in ("tcp", "shm"):
        ways = [*arguments, f"strategy.transport={transport}"]
        killed = gtrain(*ways, watch % (transport, ",kill:[1,1,7]"), often % transport, cwd=tmp_path, env=env)
        assert (tmp_path / transport / "killed").exists()
        assert killed.returncode == 1
        assert "rank 1 of 2 (machine 1) was killed by SIGKILL" in killed.stderr
        assert "Traceback" not in killed.stdout + killed.stderr
    (checkpoint,) = (tmp_path / "shm").glob("*.ckpt")  # written by ranks that share memory, read by ranks that do not
    rest = [*arguments, "strategy.transport=tcp", watch % ("rest", ""), f"ckpt_path='{checkpoint}'"]
    ok(gtrain(*rest, cwd=tmp_path, env=env))
    for rank in range(2):
        whole, found = (read_lines(tmp_path / name, rank) for name in ("whole", "rest"))
        assert found[0].startswith("1 6 ")
        assert found == whole[-len(found) :]


def read_lines(folder: Path, rank: int) -> list[str]:
    """What ``pyg_watch.Watch`` wrote."""
    return (folder / f"rank-{rank}.txt").read_text().splitlines()


def test_bad_input(tmp_path: Path) -> None:
    """Each is one sentence, and nothing has run."""
    cases = {
        "data.num_neighbors=[5]": "num_neighbors",
        "data.num_parts=3": "3 parts",
        "data.temporal_strategy=last": "time",
    }
    for setting, expected in cases.items():
        result = gtrain("strategy=pyg", *SMALL, setting, "trainer.num_nodes=2", cwd=tmp_path)
        assert result.returncode != 0, setting
        assert expected in result.stderr, (setting, result.stderr)
        assert "HINT" in result.stderr and "Traceback" not in result.stderr, (setting, result.stderr)


@pytest.mark.slow
def test_batches_of_a_gpus_stages_are_those_of_a_cpu(tmp_path: Path) -> None:
    """What tests/gpu/test_pyg.py runs on a GPU, on tensors of the CPU."""
    done = ok(forked.python(str(REPO / "tests/assets/devices/pyg_batches.py"), "cpu", cwd=tmp_path))
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 11 and all(results.values()), results
