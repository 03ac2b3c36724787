"""The parts of ``gtrain plan`` against other ways to compute the same numbers."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from helpers import REPO
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
from small_graphs import messy_graph, random_parts, stored
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, GINConv, HeteroConv, RGCNConv, SAGEConv

from gtrain.callbacks.race import RaceTimer
from gtrain.cli import auto
from gtrain.cli.auto import Candidate, race_folders
from gtrain.errors import ConfigError, GtrainError
from gtrain.files import replace_text
from gtrain.graph.shard.graph import load_hetero_shard, load_shard
from gtrain.graph.store.writer import write_store
from gtrain.memory.limits import group_limit, oom_kills, usable_memory
from gtrain.model.relational import HGT, HeteroSAGE
from gtrain.nn.relational import IdRGCNConv
from gtrain.plan import command as plan_command
from gtrain.plan import layers, machine, rows, table
from gtrain.plan.counts import (
    assume_parts,
    assume_parts_by_type,
    count_parts,
    count_parts_by_type,
    count_queries,
    cut_of_ranges,
)
from gtrain.plan.estimate import ARITHMETIC, BANDWIDTH, MEMORY, NETWORK, SENT, SERVER_MEMORY, Estimate, PlannedRun
from gtrain.plan.typed import typed_layers
from gtrain.plan.workload import IDS, RELATIONAL, Workload, _layers


def test_terms_are_their_formulas_with_the_numbers_put_in() -> None:
    estimate = Estimate(hidden=0.5)
    estimate.add(SENT, "rows", "rows * width * item", rows=10, width=3, item=4)
    estimate.add(SENT, "once", "ceil(bytes / epochs)", bytes=7, epochs=2)
    assert estimate.total(SENT) == 124
    estimate.add(ARITHMETIC, "products", "flop / flops", flop=6e9, flops=2e9)
    estimate.add(BANDWIDTH, "sums", "one", one=1.0)
    estimate.add(NETWORK, "transfer", "two", two=2.0)
    # 4 s on the cores, and half of the 2 s of transfers hidden behind them.
    assert estimate.seconds == 5 and estimate.limit == ARITHMETIC


def test_relational_layers_are_described_by_what_an_edge_reads() -> None:
    network = torch.nn.ModuleList([IdRGCNConv(40, 8, 5), RGCNConv(8, 3, 5, root_weight=False)])
    of_ids, of_features = _layers(network, {"model": {}}, False, None)
    assert (of_ids.kind, of_ids.width, of_ids.weights, of_ids.pair_weights) == (IDS, 8, 0, 0)
    assert (of_features.kind, of_features.width, of_features.pair_weights) == (RELATIONAL, 8, 24)
    assert of_ids.sums_forward and of_ids.sums_backward and of_features.sums_backward


def test_layers_over_features_in_csr_form_multiply_them_first() -> None:
    """A layer reads their entries: its sums are as wide as the products, and no product reads 1000 columns."""
    network = torch.nn.Sequential(torch.nn.Linear(1000, 8), torch.nn.ReLU(), torch.nn.Linear(8, 64))
    config: dict[str, Any] = {"model": {}}
    for conv, width, columns, others in ((SAGEConv(1000, 32), 32, 64, 0), (GINConv(network), 8, 8, 8 * 64)):
        (dense,), (sparse,) = (_layers(conv, config, True, entries) for entries in (None, 6.5))
        assert not sparse.constant or sparse.sums_forward
        assert (sparse.transforms_first, sparse.width) == (True, width)
        assert (sparse.entries, sparse.sparse_columns, sparse.weights) == (6.5, columns, others)
        assert dense.entries is None and dense.weights == others + 1000 * columns


@pytest.mark.parametrize(("limits", "ranks"), [((1.0, 1.0), True), ((0, 1.0), True), ((0, 0), False)])
def test_a_run_without_validation_and_test_ranks_nothing(limits: tuple[float, float], ranks: bool) -> None:
    run: Any = SimpleNamespace(
        config={"trainer": dict(zip(("limit_val_batches", "limit_test_batches"), limits, strict=True))}
    )
    assert layers.ranks_held_out(run) == ranks


def test_parts_are_counted_as_shards_are(tmp_path: Path) -> None:
    store = stored(tmp_path / "store", messy_graph(), random_parts(40, 3))
    parts = count_parts(store)
    for part in range(3):
        shard = load_shard(store, part)
        assert parts.halo[part] == shard.num_halo and parts.nodes[part] == shard.num_local
        by_block = [len(halo) for halo in shard.halo]
        assert parts.reads[part] == [by_block[(part - owner) % 3] for owner in range(3)]
        source, target = shard.edge_index
        for r in range(1, 3):
            block = (source >= shard.block_ptr[r]) & (source < shard.block_ptr[r + 1])
            assert parts.targets[part][(part - r) % 3] == len(target[block].unique())
    assert sum(parts.served) == sum(parts.halo)
    assert parts.cut == store.manifest.partition.edge_cut


@pytest.mark.parametrize("parts", [1, 3])
def test_queries_are_pairs_of_a_relation_and_an_end(parts: int, tmp_path: Path) -> None:
    data = messy_graph()
    store = stored(tmp_path / "plain", data, random_parts(40, parts))
    assert count_queries(store) == sum(len(ends.unique()) for ends in data.edge_index)
    data.edge_type = torch.arange(data.num_edges) % 3
    typed = stored(tmp_path / "typed", data, random_parts(40, parts))
    expected = sum(len(torch.stack([data.edge_type, ends]).unique(dim=1).T) for ends in data.edge_index)
    assert count_queries(typed) == expected


def test_parts_of_types_are_counted_as_typed_shards_are(tmp_path: Path) -> None:
    """The halo of a type is the union over the edge types that start there."""
    data = HeteroData({"a": {"num_nodes": 60}, "b": {"num_nodes": 30}})
    generator = torch.Generator().manual_seed(0)
    for source, relation, target, count in (("a", "to", "b", 90), ("a", "next", "a", 120), ("b", "back", "a", 70)):
        ends = [torch.randint(data[t].num_nodes, (count,), generator=generator) for t in (source, target)]
        data[source, relation, target].edge_index = torch.stack(ends)
    parts = {name: random_parts(data[name].num_nodes, 3) for name in ("a", "b")}
    store = write_store(
        tmp_path / "store", data, parts, 3, source={"a": 1}, facts={"target": "a"}, partitioner="file", seed=0
    )
    counted = count_parts_by_type(store)
    for part in range(3):
        shard = load_hetero_shard(store, part)
        for name, nodes in shard.nodes.items():
            assert (counted[name].nodes[part], counted[name].halo[part]) == (nodes.num_local, nodes.num_halo)
            into = sum(index.size(1) for edge_type, index in shard.edge_index.items() if edge_type[2] == name)
            assert counted[name].edges[part] == into
    cut = {name: counted[name].cut for name in counted}
    assert sum(cut.values()) == store.manifest.partition.edge_cut and min(cut.values()) > 0
    even = assume_parts_by_type(store, 2, 0.5)
    assert even["a"].nodes == [30, 30] and even["a"].edges == [95, 95]
    # 210 edges start at a: 52.5 cut ones of each part start at 30 remote nodes.
    assert even["a"].halo[0] == pytest.approx(30 * (1 - math.exp(-52.5 / 30)))


def test_layers_over_types_are_described_by_their_edge_types() -> None:
    edge_types = [("a", "to", "b"), ("a", "next", "a"), ("b", "back", "a")]
    (sage, _) = typed_layers(HeteroSAGE(8, 3, edge_types))
    # 60 + 30 sums end at a, of which there are 60 nodes: two edge types.
    nodes = {"a": 60.0, "b": 30.0}
    assert (sage.sums, sage.inputs, sage.outputs) == (True, 8, 8)
    assert sage.sums_of_types(nodes) == 150 and sage.results(nodes) == 90 and sage.source_rows(nodes) == 150
    assert sage.products(nodes) == 150 * 2 * 8 * 8
    (hgt, _) = typed_layers(HGT(8, 3, ["a", "b"], edge_types, heads=2))
    # Key, query, value and result, and two products of 4 columns with each of the 2 heads per edge type of the source.
    assert not hgt.sums and hgt.products({"a": 1.0, "b": 0.0}) == 4 * 64 + 2 * 2 * 2 * 16
    gat = HeteroConv({edge_types[0]: GATConv((8, 8), 8, add_self_loops=False)})
    assert typed_layers(gat) == ()


def test_ranges_of_parts_have_the_cut_of_the_parts(tmp_path: Path) -> None:
    data = messy_graph()
    store = stored(tmp_path / "store", data, torch.arange(40) // 10)
    # Ranges of equal size are these parts.
    assert cut_of_ranges(store, 4) == store.manifest.partition.edge_cut / store.num_edges


def test_assumed_halo_is_between_none_and_all_remote_nodes() -> None:
    none, some, many = (assume_parts(1000, 10000, 600, 4, cut) for cut in (0.0, 0.25, 1.0))
    assert none.halo == [0] * 4
    # 625 cut edges start at 750 remote nodes: 750 * (1 - exp(-625 / 750)).
    assert some.halo[0] == pytest.approx(424.05, abs=0.01)
    assert some.halo[0] < many.halo[0] < 750


def test_even_parts_have_the_sums_of_their_matrices() -> None:
    parts = assume_parts(1000, 10000, 600, 4, 0.25)
    assert parts.halo == pytest.approx([sum(row) for row in parts.reads])
    assert parts.served == pytest.approx([sum(row[p] for row in parts.reads) for p in range(4)])
    assert parts.sent_targets == pytest.approx([sum(row) for row in parts.targets])
    assert parts.received_targets == pytest.approx([sum(row[p] for row in parts.targets) for p in range(4)])
    counted = replace(parts, targets=[[5, 1, 2], [3, 6, 4], [7, 8, 9]], nodes=[1.0] * 3)
    assert counted.sent_targets == [3, 7, 15] and counted.received_targets == [10, 9, 6]
    # Those of many ranks would not fit into memory.
    many = assume_parts(1e9, 1e10, 600, 1 << 17, 0.25)
    assert len(many.sent_targets) == len(many.received_targets) == 1 << 17
    assert len(many.halo) == len(many.served) == 1 << 17 and many.halo[0] == many.served[0] > 0


class Machines:
    """A backend whose ranks need ``fixed`` bytes and share 1,000, as those of its servers are of several machines."""

    def __init__(self, fixed: float, most: int = 1 << 20) -> None:
        self.serves, self.tried, self._fixed, self._most = SimpleNamespace(limits={}), list[int](), fixed, most

    def load_planner(self) -> Any:
        return self

    def plan(self, cfg: Any) -> Any:
        machines = int(cfg.trainer.num_nodes)
        if machines > self._most:
            raise ConfigError("too few partitions")
        return [SimpleNamespace(name="server", count=machines + 1 if machines > 1 else 0)]

    def estimate(self, run: PlannedRun) -> Estimate:
        self.tried.append(run.ranks)
        estimate = Estimate()
        estimate.add(MEMORY, "imports", "fixed", fixed=self._fixed)
        estimate.add(MEMORY, "rows", "1000 / ranks", ranks=run.ranks)
        estimate.add(SERVER_MEMORY, "imports", "10")
        return estimate


def least_machines(backend: Machines, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The least machines of 120 bytes, of which the row has two."""
    config = {"trainer": {"num_nodes": 2, "devices": 1}, "plan": {"machine": None}, "cluster": {"kind": "local"}}
    monkeypatch.setattr(rows.backends, "get", lambda name: backend)
    run = PlannedRun(config, Workload(1, 1, 1), machine.Machine(memory=120), 2, 3)
    return rows.least_machines(rows.Row("fake", {}, run, backend.estimate(run))).machines


def test_each_number_of_machines_has_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each machine needs 50 + 1000 / P + 2 * 10 for its servers, of which it has at most two.
    assert least_machines(Machines(50), monkeypatch) == 20
    assert least_machines(Machines(50, most=10), monkeypatch) is None, "its settings serve 10 machines"


def test_what_a_machine_keeps_is_not_divided_any_further(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Machines(130)
    assert least_machines(backend, monkeypatch) is None and backend.tried == [2, 1, 2]


def group(root: Path, lines: str, files: dict[str, str]) -> Path:
    """A machine of 8 GiB in a folder, whose process is in these control groups."""
    for name, text in {"proc/meminfo": "MemTotal: 8388608 kB\n", "proc/self/cgroup": lines, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": "2147483648\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 2 << 30),
        ("4:cpu:/x\n3:memory:/x\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1073741824\n"}, 1 << 30),
        # In a container of version 1 the path is the host's, and the top of the mount is the group.
        ("3:memory:/docker/1\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "3221225472\n"}, 3 << 30),
        ("3:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, None),
    ],
)
def test_the_limit_is_the_smallest_of_the_control_groups(
    lines: str, files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    root = group(tmp_path, lines, files)
    assert group_limit(root) == limit
    assert usable_memory(root) == (limit or 8 << 30)


@pytest.mark.parametrize(
    ("lines", "files", "kills"),
    [
        ("0::/a\n", {"sys/fs/cgroup/a/memory.events": "oom 5\noom_kill 3\n", "proc/vmstat": "oom_kill 9\n"}, 3),
        (
            "3:memory:/x\n0::/\n",
            {"sys/fs/cgroup/memory/x/memory.oom_control": "under_oom 0\noom_kill 2\n", "proc/vmstat": "oom_kill 9\n"},
            2,
        ),
        ("0::/\n", {"proc/vmstat": "nr_free_pages 4\noom_kill 9\n"}, 9),
        ("0::/\n", {}, 0),
    ],
)
def test_kills_for_lack_of_memory_are_those_of_the_control_group(
    lines: str, files: dict[str, str], kills: int, tmp_path: Path
) -> None:
    assert oom_kills(group(tmp_path, lines, files)) == kills


def test_a_machine_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("name: rack\ncores: 36\nmemory: 256e9\n")
    loaded = machine.load(str(file))
    assert (loaded.name, loaded.cores, loaded.memory) == ("rack", 36, 256e9)
    file.write_text("core: 36\n")
    with pytest.raises(ConfigError, match=r"core.*\nHINT: the keys are name, count, cores"):
        machine.load(str(file))
    file.write_text("cores: 0\n")
    with pytest.raises(ConfigError, match="cores=0"):
        machine.load(str(file))
    file.write_text("cores: [1\n")
    with pytest.raises(ConfigError, match=f"plan.machine={file}: while parsing"):
        machine.load(str(file))


def test_constants_are_kept_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.calibration() == {} and machine.this_machine().name.endswith("not calibrated")
    assert machine.keep({"flops": 7e10, "unknown": 1}) == tmp_path / "gtrain" / "machine.json"
    assert machine.this_machine().flops == 7e10


def test_imports_take_more_with_a_torch_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = tmp_path / "torch" / "lib" / "libtorch_cuda.so"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.setattr(machine, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    assert machine.this_machine().imports == 4e8
    library.parent.mkdir()
    library.touch()
    assert machine.this_machine().imports == 6e8
    assert machine.keep({"imports": 5e8}) is not None
    assert machine.this_machine().imports == 5e8


def test_each_preset_has_its_published_sizes() -> None:
    texts = {path.stem: path.read_text() for path in (REPO / "conf" / "experiment").glob("*.yaml")}
    counted = {name for name, text in texts.items() if "override /data: counts" in text}
    assert counted == {"papers100m", "twitter2010", "freebase", "mag240m", "clicks"}


def test_two_modes_of_a_strategy_race_in_two_folders() -> None:
    first, second, other = Candidate("sar", ("mode=1",), 1), Candidate("sar", ("mode=3",), 2), Candidate("pyg", (), 3)
    assert list(race_folders(Path("run"), (first, second)).values()) == [
        Path("run/race/sar-mode-1"),
        Path("run/race/sar-mode-3"),
    ]
    assert list(race_folders(Path("run"), (first, other)).values()) == [Path("run/race/sar"), Path("run/race/pyg")]


@pytest.mark.parametrize(("said", "expected"), [({}, "sar"), ({"direction": "min"}, "pyg")])
def test_a_race_is_won_by_the_score_that_the_checkpoint_selects(
    said: dict[str, str], expected: str, tmp_path: Path
) -> None:
    values = {"sar": 9.0, "pyg": 2.0}

    def make(racer: Candidate, extra: Any) -> tuple[auto.Settled, str]:
        cfg = OmegaConf.create({"paths": {"run": ""}, "trainer": {"num_sanity_val_steps": 2}, "callbacks": {}})
        return auto.Settled(cfg, [], {"strategy": racer.strategy}), ""

    def launch(cfg: Any, choices: dict[str, str], overrides: list[str]) -> None:
        best = {"name": "val/surprise", "value": values[choices["strategy"]], **said}
        Path(cfg.paths.run, "summary.json").write_text(json.dumps({"best": best}))

    racers = (Candidate("sar", (), 1), Candidate("pyg", (), 2))
    cfg = OmegaConf.create({"paths": {"run": str(tmp_path)}})
    best, reason, _ = auto._race(cfg, racers, 1.0, make, launch)
    assert best.strategy == expected and f"{values[expected]:.4g} (" in reason


def test_a_racer_that_fails_loses(tmp_path: Path) -> None:
    def make(racer: Candidate, extra: Any) -> tuple[auto.Settled, str]:
        cfg = OmegaConf.create({"paths": {"run": ""}, "trainer": {"num_sanity_val_steps": 2}, "callbacks": {}})
        return auto.Settled(cfg, [], {"strategy": racer.strategy}), ""

    def launch(cfg: Any, choices: dict[str, str], overrides: list[str]) -> None:
        if choices["strategy"] in failing:
            raise GtrainError(f"{choices['strategy']} is out of memory.")

    racers = (Candidate("sar", (), 1), Candidate("pyg", (), 2))
    folder = tmp_path / "lr=0.1"
    last = folder / "race" / "pyg" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    cfg, failing = OmegaConf.create({"paths": {"run": str(folder)}}), ["sar"]
    best, reason, extra = auto._race(cfg, racers, 1.0, make, launch)
    assert best.strategy == "pyg" and reason == "strategy=pyg goes on; strategy=sar failed: sar is out of memory."
    parsed = OverridesParser.create().parse_override(extra[0])
    assert parsed.value() == str(last)
    failing.append("pyg")
    with pytest.raises(GtrainError, match="sar is out"):
        auto._race(cfg, racers, 1.0, make, launch)


def test_a_candidate_that_refuses_the_job_is_passed_over() -> None:
    first, second, third = Candidate("sar", ("mode=1",), 1), Candidate("sar", ("mode=3",), 2), Candidate("pyg", (), 3)
    errors = {first: GtrainError("no such optimizer.")}
    assert auto._accepted([first, second, third], errors.get, 1) == ([second], errors)
    assert auto._accepted([first, second, third], errors.get, 2)[0] == [second, third]
    assert auto._accepted([first, second, third], {}.get, 2)[0] == [first, third]
    assert "(strategy=sar mode=1: no such optimizer)" in auto._reason_of_next(second, errors)


def test_the_cores_are_at_most_those_of_the_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for limit, expected in ((None, 8), (2.5, 2), (0.5, 1)):
        monkeypatch.setattr(machine, "cpu_limit", lambda limit=limit: limit)
        assert machine.this_machine().cores == expected
    monkeypatch.undo()
    file = tmp_path / "sys/fs/cgroup/cpu.max"
    assert machine.cpu_limit(tmp_path) is None
    file.parent.mkdir(parents=True)
    for text, limit in (("max 100000", None), ("150000 100000", 1.5)):
        file.write_text(text)
        assert machine.cpu_limit(tmp_path) == limit


def test_a_race_without_scores_says_so() -> None:
    first, second = Candidate("sar", (), 1), Candidate("pyg", (), 2)
    none = auto._reason(first, second, {first: None, second: None}, 3.0)
    assert none.startswith("neither strategy=sar nor strategy=pyg has a score after 3 s; strategy=sar has the shorter")
    one = auto._reason(second, first, {first: None, second: 0.25}, 3.0)
    assert one == "strategy=pyg has a score after 3 s, 0.25 (strategy=sar has none), and goes on."


@pytest.mark.parametrize(
    ("limit", "callbacks", "words"),
    [(0, {"checkpoint": {"monitor": "auto"}}, "trainer.limit_val_batches=0"), (1.0, {}, "callbacks=none")],
)
def test_a_race_needs_scores(limit: float, callbacks: dict[str, Any], words: str) -> None:
    trainer = {"limit_val_batches": limit}
    cfg = OmegaConf.create({"trainer": trainer, "callbacks": callbacks, "strategy": {"race_seconds": 3.0}})
    with pytest.raises(ConfigError, match=f"race_seconds=3 and {words} were set"):
        auto._check_race(cfg)
    cfg.trainer.limit_val_batches, cfg.callbacks = 1.0, {"checkpoint": {"monitor": "auto"}}
    auto._check_race(cfg)


@pytest.mark.parametrize(("seconds", "epochs"), [("00:00:00:00", 100), ("01:00:00:00", 3)])
def test_a_run_of_a_race_validates_at_its_end(seconds: str, epochs: int, tmp_path: Path) -> None:
    class Counting(BoringModel):
        validated: ClassVar[list[int]] = []

        def on_validation_epoch_end(self) -> None:
            self.validated.append(self.current_epoch)

    model, timer = Counting(), RaceTimer(seconds)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, check_val_every_n_epoch=1000, callbacks=[timer], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        limit_train_batches=2, limit_val_batches=1,
    )  # fmt: skip
    if epochs == 100:
        # Stopped in the first step, and not when it starts.
        timer.on_fit_start = lambda *args: None  # type: ignore[method-assign]
    Counting.validated = []
    trainer.fit(model)
    assert Counting.validated == [0 if epochs == 100 else 2]
    assert timer.state_key == Timer().state_key


def test_a_defect_in_the_plan_of_an_automatic_choice_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def make(*_: Any) -> Any:
        raise ValueError("column 7 is missing")

    monkeypatch.setattr(auto, "preload", lambda: None)
    monkeypatch.setattr(plan_command, "make", make)
    with pytest.raises(GtrainError, match="the process that made the plan"):
        auto._choose(OmegaConf.create(), [], None)
    said = capfd.readouterr().err
    assert "Traceback" in said and "ValueError: column 7 is missing" in said


def test_a_plan_prints_settings_with_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    def row(title: str) -> Any:
        return SimpleNamespace(estimate=None, title=title, refusal=f"{title} is refused")

    work = SimpleNamespace(store=None, num_nodes=1, num_edges=1, num_seeds=1)
    of_machine = SimpleNamespace(name="[mine]", cores=1, flops=1e9, memory=1, network=1)
    plan: Any = SimpleNamespace(rows=[row("strategy.x=[a,b]"), row("[/data/a.csv]")], not_served={}, recommended=None)
    plan.workload, plan.machine, plan.num_machines, plan.reason = work, of_machine, 1, "nothing fits [/c]"
    table.show(plan)
    printed = capsys.readouterr().out
    for text in ("strategy.x=[a,b]: no estimate", "[/data/a.csv] is refused", "[mine]: 1 cores", "nothing fits [/c]"):
        assert text in printed


def test_files_of_two_machines_with_equal_process_ids_have_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[Path] = []
    replace = os.replace

    def replaced(part: Path, path: Path) -> None:
        if not parts:  # meanwhile the other machine writes the same file
            parts.append(part)
            replace_text(path, "other")
            assert path.read_text() == "other" and part.read_text() == "first"
        replace(part, path)

    monkeypatch.setattr(os, "replace", replaced)
    replace_text(tmp_path / "file", "first")
    assert (tmp_path / "file").read_text() == "first" and os.listdir(tmp_path) == ["file"]
