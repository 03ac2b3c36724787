"""What an epoch costs, in counts that do not depend on the machine: messages, bytes, kernel calls, allocations.

Counts of the layer engine alone are in ``tests/unit/engine/test_budgets.py``, those of a parameter server in
``tests/unit/ps/test_service.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
from forked import gtrain
from helpers import REPO, ok, summary
from torch import nn
from torch_geometric.nn import GAT, GraphSAGE

from gtrain import NodeClassifier, PlantedData, PygStrategy, SarStrategy, run_local
from gtrain.engine import blocks, linear
from gtrain.engine.attention import fused

FEATURES, HIDDEN, CLASSES, NODES = 64, 32, 8, 400
KERNELS = ("spmm", "attention_forward", "attention_backward")


class LastEpoch(pl.Callback):
    """Counts the last epoch of a rank: the bytes of each message, and the calls of each kernel."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.calls: Counter[str] = Counter()
        self._kernels = pytest.MonkeyPatch()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch != (trainer.max_epochs or 0) - 1:
            return
        counters: Any = trainer.strategy.counters  # type: ignore[attr-defined]
        counters.start()
        counters.sent = lambda nbytes: self.sizes.append(nbytes) if counters.recording else None
        for module in (linear, blocks, fused):
            for name in KERNELS:
                if hasattr(module, name):
                    self._kernels.setattr(module, name, self._counted(name, getattr(module, name)))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.counters.stop()  # type: ignore[attr-defined]
        self._kernels.undo()

    def _counted(self, name: str, kernel: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return kernel(*args, **kwargs)

        return call


class Counts(NamedTuple):
    """Of rank 0's last epoch; ``halo``: for each rank, how many nodes of the other its edges start at."""

    sizes: list[int]
    calls: Counter[str]
    halo: list[int]
    parameters: int


def train(strategy: Any, network: nn.Module, **data: Any) -> Counts:
    """Train three epochs as one of two ranks."""
    pl.seed_everything(0)
    counts = LastEpoch()
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", num_nodes=2, devices=1, max_epochs=3, callbacks=[counts], **quiet
    )
    source = PlantedData(num_nodes=NODES, num_edges=10 * NODES, num_features=FEATURES, num_classes=CLASSES, **data)
    trainer.fit(NodeClassifier(network, num_classes=CLASSES), datamodule=source)
    store, halo = source.open_store(), []
    for part in range(2):
        starts, (first, last) = store.edge("indices", part), store.offsets[part : part + 2]
        halo.append(starts[(starts < first) | (starts >= last)].unique().numel())
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Counts(counts.sizes, counts.calls, halo, parameters)


def train_all() -> dict[str, Counts]:
    """Train GraphSAGE and GAT in each mode of sar, and GraphSAGE on sampled batches."""
    counts = {}
    for mode in (1, 2, 3):
        counts[f"sage, mode {mode}"] = train(SarStrategy(mode=mode), GraphSAGE(FEATURES, HIDDEN, 3, CLASSES))
        counts[f"gat, mode {mode}"] = train(SarStrategy(mode=mode), GAT(FEATURES, HIDDEN, 3, CLASSES, heads=4))
    batches = {"batch_size": 100, "num_neighbors": [5, 5]}
    counts["pyg"] = train(PygStrategy(transport="tcp"), GraphSAGE(FEATURES, HIDDEN, 2, CLASSES), **batches)
    return counts


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counts]:
    folder = tmp_path_factory.mktemp("budgets")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the store is made there
        return run_local(train_all, num_nodes=2, log_dir=folder / "logs")  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_an_epoch_of_sage_sends_each_row_once_in_each_direction(counts: dict[str, Counts], mode: int) -> None:
    found = counts[f"sage, mode {mode}"]
    received, sent = found.halo
    # Layers whose result is narrower than their input are multiplied before they are summed.
    widths = (HIDDEN, HIDDEN, CLASSES)
    rows = [4 * sent * width for width in widths] + [4 * received * width for width in reversed(widths)]
    # Sums of the seeds' weight and of the ranks that are asked to end; gradients, with a number for each tensor that
    # says whether it has one.
    assert found.sizes == [*rows[:3], 16, *rows[3:], 4 * (found.parameters + 9)]
    assert found.calls == {"spmm": 2 * 2 * 3}  # a pass over the edges of each rank's rows: blocks, directions, layers


@pytest.mark.slow
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_an_epoch_of_gat_sends_logits_with_the_rows(counts: dict[str, Counts], mode: int) -> None:
    found = counts[f"gat, mode {mode}"]
    sent = found.halo[1]
    assert found.sizes[:4] == [4 * sent * (HIDDEN + 4)] * 3 + [16]  # no logits of edges
    assert len(found.sizes) == 3 + 1 + 2 * 3 + 1 and found.sizes[-1] == 4 * (found.parameters + 12)
    # Backward: at most the rows' gradients, and for the other's targets what their softmax needs.
    assert sum(found.sizes[4:-1]) <= 3 * 4 * sum(found.halo) * (HIDDEN + 2 * 4)
    assert found.calls == {"attention_forward": 2 * 3, "attention_backward": 2 * 3}


@pytest.mark.slow
def test_a_step_of_sampled_batches_sends_gradients_once(counts: dict[str, Counts]) -> None:
    found = counts["pyg"]
    assert found.sizes == 3 * [16, 4 * (found.parameters + 6)]  # features are requested apart from these messages
    assert found.calls == {"spmm": 3 * 3}  # of the first layer forward only: features need no gradient


def counted_epoch(folder: Path, functions: list[str], *overrides: str) -> tuple[dict[str, list[int]], list[int]]:
    """Run a job; return the calls of functions and the large allocations of rank 0's last epoch (``budgets.epoch``)."""
    path = folder / "budget.json"
    count = f"+callbacks.budget={{_target_:budgets.epoch.Budget,path:{path},functions:{functions}}}"
    quiet = ("logger=none", "callbacks=none", "trainer.enable_progress_bar=false", "hydra.run.dir=run")
    quiet += ("trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
    environment = {"PYTHONPATH": str(REPO / "tests" / "assets"), "OMP_NUM_THREADS": "1"}
    ok(gtrain(*overrides, *quiet, count, cwd=folder, env=environment))
    counts = json.loads(path.read_text())
    return counts["calls"], counts["allocations"]


@pytest.mark.slow
def test_an_epoch_of_single_reads_the_edges_twice_for_each_layer_after_the_first(tmp_path: Path) -> None:
    nodes, hidden = 4000, 128
    data = ("data=planted", f"data.num_nodes={nodes}", f"data.num_edges={10 * nodes}", f"data.num_features={FEATURES}")
    model = ("model=sage", "model.num_layers=3", f"model.hidden_channels={hidden}", "model.dropout=0")
    functions = ["gtrain.engine.linear:spmm"]
    calls, allocations = counted_epoch(tmp_path, functions, "strategy=single", *data, *model, "trainer.max_epochs=2")
    # The sum of the features is that of the epoch before; the others are computed forward and backward.
    assert {name: len(sizes) for name, sizes in calls.items()} == {"spmm": 2 * 2}
    # Forward: the output and the ReLU of both hidden layers, and the rows that the second one sums. Backward: the
    # gradient of the last layer, the sum of the second, and two ReLUs; products take blocks of half a MiB.
    assert allocations == (2 * 2 + 1 + 1 + 1 + 2) * [4 * nodes * hidden]
    assert summary(tmp_path / "run")["ranks"][0]["bytes_sent"] == 0


@pytest.mark.slow
def test_a_step_of_ps_sends_each_server_its_rows_and_its_gradients_once(tmp_path: Path) -> None:
    rows, batch, nonzeros, hidden, servers, workers = 2000, 200, 6, 8, 2, 2
    data = ("data=planted_sparse", f"data.num_rows={rows}", "data.num_features=500", f"data.batch_size={batch}")
    data += (f"data.features_per_row={nonzeros}", "data.train_fraction=0.6")
    model = ("model=sparse", f"model.hidden_channels={hidden}")
    model += ("model.sparse_optimizer._target_=gtrain.nn.RowwiseAdagrad",)
    settings = ("strategy=ps", f"strategy.servers={servers}", f"trainer.num_nodes={workers}", "trainer.max_epochs=2")
    settings += ("strategy.durability=none",)  # without the records by which a restarted worker continues
    functions = ["gtrain_ps.worker.servers:ParameterServers.submit", "gtrain.strategy.mesh:Mesh.send"]
    functions += [f"gtrain_ps.kernels.rows:{name}" for name in ("locate_ids", "count_blocks", "sort_by_block")]
    calls, allocations = counted_epoch(tmp_path, functions, *settings, *data, *model)
    steps, share = int(0.6 * rows) // batch, batch // workers
    passes = {"locate_ids": steps, "count_blocks": steps, "sort_by_block": steps}  # over the entries of a batch
    requests = {"submit(multiply)": servers * steps, "submit(commit)": servers * steps}
    between_workers = {"send": 2}  # the loss of the epoch, and its weight
    expected = passes | requests | between_workers
    assert {name: len(sizes) for name, sizes in calls.items()} == expected
    # Ids of 4 bytes, each to one server, and 2 bytes for the number of a row's entries on each server.
    assert sum(calls["submit(multiply)"]) == steps * (4 * share * nonzeros + 2 * servers * share)
    # Gradients of the products by all servers; those of the bias and the last layer once, with a number for each of
    # the three tensors that says whether it has one, and a number that says whether the job is asked to end.
    rest = hidden + 2 * (hidden + 1) + 3 + 1
    assert sum(calls["submit(commit)"]) == 4 * steps * (servers * share * hidden + rest)
    assert not allocations


@pytest.mark.slow
def test_an_epoch_of_pbg_reads_each_bucket_once_and_moves_each_partition_as_planned(tmp_path: Path) -> None:
    entities, partitions, dimension = 6000, 4, 128
    data = ("data=planted_kg", f"data.num_entities={entities}", "data.num_triples=40000", "data.num_relations=4")
    model = ("model=kg", f"model.dimension={dimension}", "data.batch_size=10000", "trainer.max_epochs=2")
    settings = ("strategy=pbg", f"strategy.num_partitions={partitions}", "strategy.buffer_partitions=2")
    settings += ("strategy.bucket_order=inside_out", "data.partitioner=random")
    partition_files = "gtrain_pbg.partition_store:LocalPartitions"
    functions = ["gtrain_pbg.edges:BucketEdges.share", "gtrain.strategy.group:Group.barrier"]
    functions += ["gtrain_pbg.kernels.chunks:train_chunks", "gtrain_pbg.step.chunks:apply_sums"]
    functions += [f"{partition_files}.{name}" for name in ("load", "save")]
    calls, allocations = counted_epoch(tmp_path, functions, *settings, *data, *model)
    moved = {name: [] for name in ("load", "save")}
    for name in [name for name in calls if "(" in name]:  # with the key of a partition
        moved[name.partition("(")[0]] += calls.pop(name)
    # A bucket is read once and is one batch here, which updates the rows of either end; workers meet before and after.
    buckets = partitions**2
    once = {"share": buckets, "train_chunks": buckets, "apply_sums": 2 * buckets, "barrier": 2 * buckets}
    assert {name: len(sizes) for name, sizes in calls.items()} == once
    # Of the pairs 01, 02, 12, 03, 13, 23 the first needs two partitions, 03 two, the others one. Each leaves later.
    size = entities // partitions * (dimension + 1) * 4  # with a number of optimizer state for each row
    assert moved == {"load": (2 + 1 + 1 + 2 + 1 + 1) * [size], "save": 8 * [size]}
    assert not allocations  # buffers are those of the epoch before
