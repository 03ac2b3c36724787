"""What every strategy must do, as tests that a backend runs against itself.

A module that pytest collects subclasses :class:`Conformance`::

    from gtrain.testing.conformance import Conformance


    class TestReplicated(Conformance):
        strategy = "replicated"

Each test runs the ``gtrain`` command of the environment on data that it generates, in a folder of its own, with a
time-out that kills all processes and shows the end of each rank's log. Needs Linux and pytest
(``pip install gtrain[conformance]``).
"""

from __future__ import annotations

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

from gtrain.testing import processes
from gtrain.testing.processes import LIMIT, ok, show, summary

EPOCHS = 4
Overrides = tuple[str, ...]
Parts = Callable[[Path, int], tuple[Overrides, Overrides]]
"""Given a folder and a number of ranks: writes data there, and returns the overrides for it and for its parts."""


@dataclass(frozen=True)
class Workload:
    """A model and generated data that train in a second or two.

    Attributes:
        data: overrides. The number of training seeds is divisible by neither 2 nor 3, nor are those of a step.
        model: overrides of the model, and of how it trains; dropout is on where the model has it.
        one_seed: more overrides with which one seed trains, so that all ranks but one have none; none: there is no such
            setting.
        unequal: writes other data, whose parts have unequal numbers of nodes and of seeds; None: the data has no parts.
    """

    data: Overrides
    model: Overrides
    one_seed: Overrides = ()
    unequal: Parts | None = None


def _unequal_graph(folder: Path, ranks: int) -> tuple[Overrides, Overrides]:
    """A ring with chords of 61 nodes; part 0 has all but two of each other part's, and the labelled ones."""
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
"""Classes of nodes, by two convolutions in full batch."""
BATCHES_OF_NODES = replace(NODES, model=(*NODES.model, "data.batch_size=65"))
"""The same in mini-batches of 65 seeds over all ranks."""
ROWS = Workload(
    data=("data=planted_sparse", "data.num_rows=401", "data.num_features=50", "data.features_per_row=6"),
    model=("model=sparse", "model.hidden_channels=8", "model.dropout=0.5", "data.batch_size=65"),
    one_seed=("data.train_fraction=0.003", "data.val_fraction=0.003"),
)
"""Classes of rows of sparse features, in mini-batches, with a table of :mod:`gtrain.nn`."""
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
"""Triples of a knowledge graph, all of them in a step, against all entities."""


class Conformance:
    """The tests; a subclass says what to run. Its name begins with ``Test``, as pytest wants it.

    Attributes:
        strategy: its name.
        settings: overrides that it needs, for all runs of it; ``strategy=single`` trains without them.
        workload: what it trains.
        ranks: numbers of ranks, each with the largest relative difference of a loss from that of ``strategy=single``.
            A strategy whose ranks do not wait for each other gives a larger one.
        ranks_key: the setting for the number of ranks: ``trainer.num_nodes``, or ``trainer.devices``.
        fragile: overrides with which the death of a rank ends the job, for one that restarts ranks.
        timeout: seconds for each command.
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
        cls, folder: Path, ranks: int, *overrides: str, data: Overrides | None = None, tmp: Path | None = None
    ) -> CompletedProcess[str]:
        """Run a command of the strategy in a folder, whose ``run`` becomes the run's; a later override rules.

        Args:
            folder: where it runs.
            ranks: how many.
            overrides: besides the workload's and the strategy's.
            data: instead of the workload's.
            tmp: the folder for temporary files.
        """
        chosen = (f"strategy={cls.strategy}", *(data or cls.workload.data), *cls.workload.model, *_SETTINGS)
        arguments = (*chosen, f"{cls.ranks_key}={ranks}", *cls.settings, *overrides, "hydra.run.dir=run")
        env = {**cls.env, **({} if tmp is None else {"TMPDIR": str(tmp)})}
        return cls.command(*arguments, cwd=folder, timeout=cls.timeout, env=env)

    @classmethod
    def train(cls, folder: Path, ranks: int, *overrides: str, data: Overrides | None = None) -> dict[str, Any]:
        """Train, and return the summary."""
        done = ok(cls.run(folder, ranks, *overrides, data=data))
        found = summary(folder / "run")
        assert found["world_size"] == ranks, f"{found['world_size']} ranks trained, not {ranks}\n{show(done)}"
        return found

    @classmethod
    def single(cls, *overrides: str, data: Overrides | None = None) -> dict[str, Any]:
        """Return the summary of one process that trains the same."""
        arguments = ("strategy=single", *(data or cls.workload.data), *cls.workload.model, *_SETTINGS)
        return _reference(cls.command, (*arguments, *overrides), cls.timeout)

    @classmethod
    def exact(cls) -> int:
        """The largest number of ranks that repeat a run to the last digits."""
        return max(ranks for ranks, tolerance in cls.ranks.items() if tolerance <= 1e-6)

    # ------------------------------------------------------------------------------------------------ the tests

    def test_losses_are_those_of_one_process(self) -> None:
        """In double precision, with dropout, and with numbers of seeds that the ranks do not divide."""
        for ranks, tolerance in self.ranks.items():
            assert_alike(summary(_trained(type(self), ranks)), self.single(), tolerance)

    def test_a_resumed_run_is_the_unbroken_run(self, tmp_path: Path) -> None:
        """Losses, and the test of the best checkpoint."""
        ranks, half = self.exact(), EPOCHS // 2
        whole = summary(_trained(type(self), ranks))
        self.train(tmp_path, ranks, f"trainer.max_epochs={half}")
        rest = self.train(tmp_path, ranks, "ckpt_path=run/checkpoints/last.ckpt")
        assert [entry["epoch"] for entry in rest["history"]] == list(range(half, EPOCHS))
        assert_alike(rest, {**whole, "history": whole["history"][half:]}, 1e-10)

    def test_ranks_may_have_unequal_parts_of_the_data(self, tmp_path: Path) -> None:
        """One rank has nearly all nodes and every seed; the others have two nodes each."""
        if self.workload.unequal is None or max(self.ranks) == 1:
            pytest.skip("the workload has no parts, or the strategy one rank")
        ranks = max(self.ranks)
        data, parts = self.workload.unequal(tmp_path, ranks)
        found = self.train(tmp_path, ranks, data=(*data, *parts))
        assert_alike(found, self.single(data=data), self.ranks[ranks])

    def test_ranks_may_have_no_seed(self, tmp_path: Path) -> None:
        """One seed trains, so that all ranks but one have none, and still take every step."""
        if not self.workload.one_seed or max(self.ranks) == 1:
            pytest.skip("the workload has no such setting, or the strategy one rank")
        ranks, one = max(self.ranks), self.workload.one_seed
        assert_alike(self.train(tmp_path, ranks, *one), self.single(*one), self.ranks[ranks])

    def test_a_killed_rank_is_named_and_nothing_is_left(self, tmp_path: Path) -> None:
        """The first cause is named, every process ends, and no file is left but the run's own."""
        ranks, record, tmp = max(self.ranks), tmp_path / "session", tmp_path / "tmp"
        tmp.mkdir()
        kill = f"{{_target_:gtrain.testing.faults.KillRank,rank:{ranks - 1},epoch:1,record:'{record}'}}"
        done = self.run(tmp_path, ranks, f"+callbacks.kill={kill}", *self.fragile, tmp=tmp)
        assert record.exists(), f"no rank was killed\n{show(done)}"
        assert done.returncode == 1, show(done)
        assert re.search(rf"rank {ranks - 1}\b.* was killed by SIGKILL", done.stderr), show(done)
        assert "Traceback" not in done.stdout + done.stderr, show(done)
        session = int(record.read_text())
        processes.until(lambda: not processes.of_session(session), tmp_path)
        assert not list(tmp.iterdir())
        assert not (tmp_path / "run" / "summary.json").exists()
        assert not list((tmp_path / "run" / "checkpoints").glob("*.part"))

    def test_a_damaged_checkpoint_is_refused(self, tmp_path: Path) -> None:
        """One bit of the smallest file or of the largest is enough; the message names the checkpoint."""
        whole = _trained(type(self), self.exact()) / "checkpoints" / "last.ckpt"
        files = sorted((path for path in whole.iterdir() if path.stat().st_size), key=lambda path: path.stat().st_size)
        for damaged in (files[0], files[-1]):
            copy = tmp_path / "damaged.ckpt"
            shutil.copytree(whole, copy)
            _flip_a_bit(copy / damaged.name)
            done = self.run(tmp_path, self.exact(), f"ckpt_path={copy}", f"trainer.max_epochs={EPOCHS + 1}")
            assert done.returncode == 1, show(done)
            assert str(copy) in done.stderr and "Traceback" not in done.stdout + done.stderr, show(done)
            shutil.rmtree(copy)


_SETTINGS = (
    *("trainer.precision=64-true", f"trainer.max_epochs={EPOCHS}", "logger=none", "trainer.enable_progress_bar=false"),
)
_RUNS: dict[tuple[type[Conformance], int], tempfile.TemporaryDirectory[str]] = {}


def _trained(checks: type[Conformance], ranks: int) -> Path:
    """The folder of a run of :data:`EPOCHS` epochs, which several tests look at: it is trained once."""
    if (checks, ranks) not in _RUNS:
        folder = tempfile.TemporaryDirectory(prefix="gtrain-conformance-")
        checks.train(Path(folder.name), ranks)
        _RUNS[checks, ranks] = folder
    return Path(_RUNS[checks, ranks].name) / "run"


def assert_alike(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    """Compare the losses of all epochs, and the test's, of two summaries.

    Args:
        found: ``summary.json`` of a run.
        expected: that of the run that it should be.
        tolerance: the largest relative difference.

    Raises:
        AssertionError: names the loss and the epoch.
    """
    assert len(found["history"]) == len(expected["history"])
    for mine, other in zip(found["history"], expected["history"], strict=True):
        for name in ("train/loss", "val/loss"):
            assert mine[name] == pytest.approx(other[name], rel=tolerance), f"{name} of epoch {mine['epoch']}"
    assert found["metrics"]["test/loss"] == pytest.approx(expected["metrics"]["test/loss"], rel=tolerance)


@cache
def _reference(command: Callable[..., CompletedProcess[str]], arguments: Overrides, timeout: float) -> dict[str, Any]:
    """What one process trains: once for all strategies with the same workload."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ok(command(*arguments, "hydra.run.dir=run", cwd=folder, timeout=timeout, env={}))
        return summary(folder / "run")


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
