"""Conformance tests for strategies.

A test module of a backend subclasses :class:`Conformance`::

    from gtrain.testing.conformance import Conformance


    class TestReplicated(Conformance):
        strategy = "replicated"

Each test runs the ``gtrain`` command in a new folder on generated data. On a time-out all processes are killed and the
last lines of each rank's log are shown. Requires Linux and pytest (``pip install gtrain[conformance]``).
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, ClassVar

import pytest

from gtrain.plan.rows import NO_FORMULAS
from gtrain.testing import processes
from gtrain.testing.processes import LIMIT, ok, show, summary

EPOCHS = 4
MESSAGE_BYTES = 1024
"""Bytes of an epoch beside those that grow with data and model: counts of seeds, flags, ends of epochs."""
Overrides = tuple[str, ...]
Parts = Callable[[Path, int], tuple[Overrides, Overrides]]
"""Writes data for a number of ranks into a folder; returns the overrides for the data and for the parts."""


@dataclass(frozen=True)
class Workload:
    """A model and generated data that train within seconds.

    Attributes:
        data: overrides of the data. Neither the number of training seeds nor that of a step is divisible by 2 or 3.
        model: overrides of the model and its training, with dropout if the model has it.
        one_seed: further overrides for a single training seed, so that all ranks but one have none; empty if the data
            cannot be configured so.
        unequal: writes data whose parts have unequal numbers of nodes and seeds; None if the data has no parts.
    """

    data: Overrides
    model: Overrides
    one_seed: Overrides = ()
    unequal: Parts | None = None


def _unequal_graph(folder: Path, ranks: int) -> tuple[Overrides, Overrides]:
    """Write a ring of 61 nodes with chords. Every part but 0 has two unlabelled nodes; part 0 has all others."""
    nodes = 61
    edges = [(node, (node + step) % nodes) for node in range(nodes) for step in (1, 7)]
    parts = [node % ranks if node < 2 * ranks else 0 for node in range(nodes)]
    (folder / "edges.txt").write_text("".join(f"{a} {b}\n{b} {a}\n" for a, b in edges))
    (folder / "labels.txt").write_text("".join(f"{node % 3 if node >= 2 * ranks else -1}\n" for node in range(nodes)))
    (folder / "features.txt").write_text("".join(f"{node % 3} {node % 5} {node % 7}\n" for node in range(nodes)))
    (folder / "parts.txt").write_text("".join(f"{part}\n" for part in parts))
    files = (
        f"data.path={folder}/edges.txt",
        f"data.labels={folder}/labels.txt",
        f"data.features={folder}/features.txt",
    )
    return (
        ("data=edges", "data.unlabelled=-1", *files),
        ("data.partitioner=file", f"data.partition_path={folder}/parts.txt", f"data.num_parts={ranks}"),
    )


NODES = Workload(
    data=("data=planted", "data.num_nodes=301", "data.num_edges=2400", "data.num_features=8", "data.num_classes=3"),
    model=("model=sage", "model.hidden_channels=8", "model.dropout=0.5"),
    one_seed=("data.train_fraction=0.004", "data.val_fraction=0.004"),
    unequal=_unequal_graph,
)
"""Node classification by two convolutions in full batch."""
BATCHES_OF_NODES = replace(NODES, model=(*NODES.model, "data.batch_size=65"))
"""Node classification in mini-batches of 65 seeds over all ranks."""
ROWS = Workload(
    data=("data=planted_sparse", "data.num_rows=401", "data.num_features=50", "data.features_per_row=6"),
    model=("model=sparse", "model.hidden_channels=8", "model.dropout=0.5", "data.batch_size=65"),
    one_seed=("data.train_fraction=0.003", "data.val_fraction=0.003"),
)
"""Classification of sparse rows in mini-batches, with a table of :mod:`gtrain.nn`."""
TRIPLES = Workload(
    data=(
        "data=planted_kg",
        "data.num_entities=40",
        "data.num_positions=8",
        "data.num_relations=2",
        "data.num_triples=301",
    ),
    model=("model=kg", "model.dimension=8", "model.init_scale=0.1", "model.all_negs=true", "data.batch_size=null"),
)
"""Knowledge graph embeddings: all triples in one step, scored against all entities."""


class Conformance:
    """Base class of a strategy's conformance tests. The name of a subclass starts with ``Test``, as pytest requires.

    Attributes:
        strategy: name of the strategy.
        settings: overrides for all runs of the strategy; the reference, ``strategy=single``, trains without them.
        workload: model and data.
        ranks: numbers of ranks, each with the largest relative difference of losses from those of ``strategy=single``.
            A strategy whose ranks step independently sets a larger one.
        ranks_key: key of the number of ranks, ``trainer.num_nodes`` or ``trainer.devices``.
        fragile: overrides that disable restarts, for a strategy that restarts ranks.
        timeout: time limit of each command in seconds.
        env: environment variables of the commands.
        command: runs ``gtrain`` with arguments; see :func:`gtrain.testing.processes.gtrain`.
    """

    strategy: ClassVar[str]
    settings: ClassVar[Overrides] = ()
    workload: ClassVar[Workload] = NODES
    ranks: ClassVar[Mapping[int, float]] = {2: 1e-10, 3: 1e-10}
    ranks_key: ClassVar[str] = "trainer.num_nodes"
    fragile: ClassVar[Overrides] = ()
    timeout: ClassVar[float] = LIMIT
    env: ClassVar[Mapping[str, str]] = {}
    command: ClassVar[Callable[..., CompletedProcess[str]]] = staticmethod(processes.gtrain)

    @classmethod
    def run(
        cls,
        folder: Path,
        ranks: int,
        *overrides: str,
        data: Overrides | None = None,
        tmp: Path | None = None,
        verb: str = "train",
    ) -> CompletedProcess[str]:
        """Train with the strategy. The run's folder is ``folder / "run"``; later overrides take precedence.

        Args:
            folder: working folder of the command.
            ranks: number of ranks.
            overrides: overrides in addition to the workload's and the strategy's.
            data: overrides that replace the workload's data.
            tmp: folder for temporary files.
            verb: of the command.
        """
        common = (f"strategy={cls.strategy}", *(data or cls.workload.data), *cls.workload.model, *_SETTINGS)
        arguments = (*common, f"{cls.ranks_key}={ranks}", *cls.settings, *overrides, "hydra.run.dir=run")
        env = {**cls.env, **({} if tmp is None else {"TMPDIR": str(tmp)})}
        return cls.command(verb, *arguments, cwd=folder, timeout=cls.timeout, env=env)

    @classmethod
    def train(cls, folder: Path, ranks: int, *overrides: str, data: Overrides | None = None) -> dict[str, Any]:
        """Train with the strategy and return the summary; see :meth:`run`."""
        result = ok(cls.run(folder, ranks, *overrides, data=data))
        trained = summary(folder / "run")
        assert trained["world_size"] == ranks, f"{trained['world_size']} ranks trained, not {ranks}\n{show(result)}"
        return trained

    @classmethod
    def single(cls, *overrides: str, data: Overrides | None = None) -> dict[str, Any]:
        """Train the same workload with ``strategy=single``, whose layers run as PyG wrote them; return the summary."""
        arguments = (
            "strategy=single",
            "strategy.layers=plain",
            *(data or cls.workload.data),
            *cls.workload.model,
            *_SETTINGS,
        )
        return _reference(cls.command, (*arguments, *overrides), cls.timeout)

    @classmethod
    def exact(cls) -> int:
        """Return the largest number of ranks whose runs are reproducible, which have a tolerance of at most 1e-6."""
        return max(ranks for ranks, tolerance in cls.ranks.items() if tolerance <= 1e-6)

    # ------------------------------------------------------------------------------------------------ the tests

    def test_losses_are_those_of_one_process(self) -> None:
        """In double precision, with dropout, and with numbers of seeds that are not divisible by the ranks."""
        for ranks, tolerance in self.ranks.items():
            assert_alike(summary(_trained(type(self), ranks)), self.single(), tolerance)

    def test_a_resumed_run_is_the_unbroken_run(self, tmp_path: Path) -> None:
        """Losses of the remaining epochs, and the test loss of the best checkpoint."""
        ranks, half = self.exact(), EPOCHS // 2
        whole = summary(_trained(type(self), ranks))
        self.train(tmp_path, ranks, f"trainer.max_epochs={half}")
        rest = self.train(tmp_path, ranks, "ckpt_path=run/checkpoints/last.ckpt")
        assert [entry["epoch"] for entry in rest["history"]] == list(range(half, EPOCHS))
        assert_alike(rest, {**whole, "history": whole["history"][half:]}, 1e-10)

    def test_ranks_may_have_unequal_parts_of_the_data(self, tmp_path: Path) -> None:
        """One rank has nearly all nodes and all seeds; the others have two nodes each."""
        ranks = max(self.ranks)
        if self.workload.unequal is None or ranks == 1:
            pytest.skip("the workload has no parts, or the strategy one rank")
        data, parts = self.workload.unequal(tmp_path, ranks)
        assert_alike(self.train(tmp_path, ranks, data=(*data, *parts)), self.single(data=data), self.ranks[ranks])

    def test_ranks_may_have_no_seed(self, tmp_path: Path) -> None:
        """With one training seed all ranks but one have none, and still take every step."""
        ranks, one_seed = max(self.ranks), self.workload.one_seed
        if not one_seed or ranks == 1:
            pytest.skip("the workload has no such setting, or the strategy one rank")
        assert_alike(self.train(tmp_path, ranks, *one_seed), self.single(*one_seed), self.ranks[ranks])

    def test_the_plan_is_the_measured_run(self, tmp_path: Path) -> None:
        """``gtrain plan`` states the bytes that a rank sends within 5 %, and its memory within 20 %."""
        ranks = self.exact()
        measured = summary(_trained(type(self), ranks))["ranks"]
        result = ok(self.run(tmp_path, ranks, verb="plan"))
        rows = json.loads((tmp_path / "run" / "plan.json").read_text())["rows"]
        row = next(row for row in rows if row["strategy"] == self.strategy)
        if row["refusal"] == NO_FORMULAS:
            pytest.skip("the backend states no formulas")
        assert row["refusal"] is None, f"no estimate: {row['refusal']}\n{show(result)}"
        workers = [rank for rank in measured if rank["role"] == "worker"]
        sent = max(rank["bytes_sent"] for rank in workers) / EPOCHS
        assert row["sent_bytes_per_epoch"] == pytest.approx(sent, rel=0.05, abs=MESSAGE_BYTES)
        assert row["memory_bytes"] == pytest.approx(max(rank["peak_anonymous_bytes"] for rank in workers), rel=0.2)

    def test_a_killed_rank_is_named_and_nothing_is_left(self, tmp_path: Path) -> None:
        """The message names the first cause, all processes end, and only files of the run remain."""
        ranks, record, tmp = max(self.ranks), tmp_path / "session", tmp_path / "tmp"
        tmp.mkdir()
        kill = f"{{_target_:gtrain.testing.faults.KillRank,rank:{ranks - 1},epoch:1,record:'{record}'}}"
        result = self.run(tmp_path, ranks, f"+callbacks.kill={kill}", *self.fragile, tmp=tmp)
        assert record.exists(), f"no rank was killed\n{show(result)}"
        assert result.returncode == 1, show(result)
        assert re.search(rf"rank {ranks - 1}\b.* was killed by SIGKILL", result.stderr), show(result)
        assert "Traceback" not in result.stdout + result.stderr, show(result)
        session = int(record.read_text())
        processes.until(lambda: not processes.of_session(session), tmp_path)
        assert not list(tmp.iterdir())
        assert not (tmp_path / "run" / "summary.json").exists()
        assert not list((tmp_path / "run" / "checkpoints").glob("*.part"))

    def test_a_damaged_checkpoint_is_refused(self, tmp_path: Path) -> None:
        """One changed bit of the smallest or the largest file suffices; the message names the checkpoint."""
        complete = _trained(type(self), self.exact()) / "checkpoints" / "last.ckpt"
        sizes = sorted((path.stat().st_size, path.name) for path in complete.iterdir() if path.stat().st_size)
        for _, name in (sizes[0], sizes[-1]):
            copy = tmp_path / "damaged.ckpt"
            shutil.copytree(complete, copy)
            content = bytearray((copy / name).read_bytes())
            content[len(content) // 2] ^= 1
            (copy / name).write_bytes(content)
            result = self.run(tmp_path, self.exact(), f"ckpt_path={copy}", f"trainer.max_epochs={EPOCHS + 1}")
            assert result.returncode == 1, show(result)
            assert str(copy) in result.stderr and "Traceback" not in result.stdout + result.stderr, show(result)
            shutil.rmtree(copy)


_SETTINGS = tuple(
    f"trainer.precision=64-true trainer.max_epochs={EPOCHS} logger=none trainer.enable_progress_bar=false".split()
)
_RUNS: dict[tuple[type[Conformance], int], tempfile.TemporaryDirectory[str]] = {}


def _trained(checks: type[Conformance], ranks: int) -> Path:
    """Return the folder of a run of :data:`EPOCHS` epochs, which several tests share."""
    if (checks, ranks) not in _RUNS:
        folder = tempfile.TemporaryDirectory(prefix="gtrain-conformance-")
        checks.train(Path(folder.name), ranks)
        _RUNS[checks, ranks] = folder
    return Path(_RUNS[checks, ranks].name) / "run"


def assert_alike(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    """Compare the losses of all epochs, and the test loss, of two summaries.

    Args:
        found: ``summary.json`` of a run.
        expected: ``summary.json`` of the reference.
        tolerance: the largest relative difference.

    Raises:
        AssertionError: losses differ; the message names the loss and the epoch.
    """
    assert len(found["history"]) == len(expected["history"])
    for epoch, reference in zip(found["history"], expected["history"], strict=True):
        for name in ("train/loss", "val/loss"):
            assert epoch[name] == pytest.approx(reference[name], rel=tolerance), f"{name} of epoch {epoch['epoch']}"
    assert found["metrics"]["test/loss"] == pytest.approx(expected["metrics"]["test/loss"], rel=tolerance)


@cache
def _reference(command: Callable[..., CompletedProcess[str]], arguments: Overrides, timeout: float) -> dict[str, Any]:
    """Return the summary of one process, which all strategies with the same workload share."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ok(command(*arguments, "hydra.run.dir=run", cwd=folder, timeout=timeout, env={}))
        return summary(folder / "run")
