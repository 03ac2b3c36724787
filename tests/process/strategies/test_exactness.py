"""Every sar run trains what one process trains: the loss of each epoch, to the stated tolerance."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from helpers import rest_exhaustive

SMALL = ["data.num_nodes=300", "data.num_edges=3000", "data.num_features=12", "data.num_classes=4"]
SETTINGS = ["callbacks=none", "logger=none", "trainer.limit_test_batches=0", "trainer.max_epochs=10"]
EXACT = ["model.dropout=0.5", "trainer.precision=64-true"]
MODELS = {
    "gcn": ["model=gcn"],
    "sage mean": ["model=sage", "model.aggr=mean"],
    "sage max": ["model=sage", "model.aggr=max"],
    "gat": ["model=gat", "model.hidden_channels=16", "model.heads=4"],
    "gin": ["model=gin"],
}
Runner = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def sweep(tmp_path: Path) -> Runner:
    """Runs a sweep and returns the summaries of its jobs in order."""

    def run(*overrides: str, name: str) -> list[dict[str, Any]]:
        return forked.sweep(tmp_path / name, *SETTINGS, *overrides)

    return run


def worst(expected: dict[str, Any], found: dict[str, Any], name: str = "train/loss") -> float:
    """Largest relative difference of a value over the epochs."""
    pairs = list(zip(expected["history"], found["history"], strict=True))
    assert len(pairs) == len(expected["epoch_seconds"]) > 2
    return max(abs(a[name] - b[name]) / abs(a[name]) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("model", rest_exhaustive(MODELS, "sage max", "gat"))
def test_every_mode_and_number_of_ranks_on_a_planted_graph(sweep: Runner, model: str) -> None:
    arguments = [*SMALL, *MODELS[model], *EXACT]
    (single,) = sweep("strategy=single", "strategy.layers=plain", *arguments, name="single")
    sharded = sweep("strategy=sar", "mode=1,2,3", "trainer.num_nodes=3", *arguments, name="sar")
    ranks = "4" if model == "gat" else "2"
    at_random = [f"trainer.num_nodes={ranks}", "data.partitioner=random"]
    sharded += sweep("strategy=sar", "mode=1", *at_random, *arguments, name="random")
    assert [run["world_size"] for run in sharded] == [3, 3, 3, int(ranks)] and len(single["history"]) == 10
    for run in sharded:
        for name in ("train/loss", "val/loss"):
            assert worst(single, run, name) < 1e-10
        assert [e["val/acc"] for e in run["history"]] == [e["val/acc"] for e in single["history"]]


CONNECTED = {
    "gcn": ["model=gcn", "model.ego=true", "model.residual=true", "model.jk=cat"],
    "sage": ["model=sage", "model.residual=true", "model.jk=max", "model.norm=layer"],
    "gat": ["model=gat", "model.hidden_channels=16", "model.heads=4", "model.ego=true", "model.residual=true"],
    "gin": ["model=gin", "model.ego=true", "model.jk=lstm"],
}


@pytest.mark.slow
@pytest.mark.parametrize("model", rest_exhaustive(CONNECTED, "gat"))
def test_connections_around_convolutions_and_smoothed_labels(sweep: Runner, model: str) -> None:
    """Of three layers: the second has equal widths, and so a residual connection without weights."""
    arguments = [*SMALL, *CONNECTED[model], *EXACT, "model.num_layers=3", "model.label_smoothing=0.1"]
    arguments += ["trainer.max_epochs=3"]
    (single,) = sweep("strategy=single", "strategy.layers=plain", *arguments, name="single")
    found = sweep("strategy=single", *arguments, name="engine")
    found += sweep("strategy=sar", "mode=1,2,3", "trainer.num_nodes=3", *arguments, name="sar")
    whole = ["strategy=pyg", "data.num_neighbors=[-1,-1,-1]", "strategy.seeds=global", "data.batch_size=null"]
    found += sweep(*whole, "trainer.num_nodes=2", *arguments, name="pyg")
    assert [run["world_size"] for run in found] == [1, 3, 3, 3, 2]
    for run in found:
        for name in ("train/loss", "val/loss"):
            assert worst(single, run, name) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("model", rest_exhaustive(["sage max", "gat"], "gat"))
def test_cora(sweep: Runner, real_data: Callable[[str], Path], model: str) -> None:
    """A real graph's degrees; ten epochs are held above."""
    data = ["data=planetoid", "data.name=Cora", f"data.root={real_data('planetoid')}", "trainer.max_epochs=4"]
    (single,) = sweep("strategy=single", "strategy.layers=plain", *data, *MODELS[model], *EXACT, name="single")
    for run in sweep("strategy=sar", "mode=1,2", "trainer.num_nodes=3", *data, *MODELS[model], *EXACT, name="sar"):
        assert worst(single, run) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("model", "tolerance"), rest_exhaustive([("gcn", 1e-4), ("gin", 1e-3)], ("gcn", 1e-4)))
def test_photo_in_single_precision(
    sweep: Runner, real_data: Callable[[str], Path], model: str, tolerance: float
) -> None:
    """Ten epochs are held above; these take longer."""
    data = ["data=amazon", "data.name=Photo", f"data.root={real_data('amazon')}", "data.partitioner=random"]
    arguments = [*data, *MODELS[model], "model.dropout=0", "trainer.max_epochs=4"]
    (single,) = sweep("strategy=single", "strategy.layers=plain", *arguments, name="single")
    for run in sweep("strategy=sar", "mode=1", "trainer.num_nodes=2", *arguments, name="sar"):
        assert worst(single, run) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("model", rest_exhaustive(["gcn", "gat"], "gat"))
def test_with_dropout_mode_1_is_mode_2(sweep: Runner, model: str) -> None:
    arguments = [*SMALL, *MODELS[model], "trainer.precision=64-true", "trainer.num_nodes=3", "model.dropout=0.5"]
    first, second, again = sweep("mode=1,2", *arguments, name="both") + sweep("mode=1", *arguments, name="again")
    assert worst(first, second) < 1e-10
    assert worst(first, again) == 0.0
    plain = sweep("mode=1", *arguments[:-1], "model.dropout=0", name="plain")
    assert worst(first, plain[0]) > 1e-3  # dropout does something


@pytest.mark.slow
def test_batch_norm_class_weights_clipping_and_prefetch(sweep: Runner) -> None:
    """With SGD: Adam would blow up rounding noise in a bias that batch norm makes ineffective."""
    arguments = [
        *SMALL,
        *EXACT,
        "model=sage",
        "model.norm=batch",
        "model.class_weights=[1,2,3,4]",
        "model.optimizer._target_=torch.optim.SGD",
        "model.optimizer.lr=0.1",
        "trainer.gradient_clip_val=0.5",
    ]
    (single,) = sweep("strategy=single", "strategy.layers=plain", *arguments, name="single")
    for run in sweep("mode=1,2", "strategy.prefetch=0,3", "trainer.num_nodes=3", *arguments, name="sar"):
        for name in ("train/loss", "val/loss"):
            assert worst(single, run, name) < 1e-10
    (balanced,) = sweep(
        "strategy=single", "strategy.layers=plain", *arguments, "model.class_weights=balanced", name="balanced"
    )
    assert worst(single, balanced) > 1e-3


@pytest.mark.slow
def test_a_rank_without_training_nodes_and_a_rank_without_halo(sweep: Runner, tmp_path: Path) -> None:
    """Nodes 0-9 form a path apart from nodes 10-19; only the first half has training nodes, and nobody reads across."""
    edges = [(i, i + 1) for i in range(9)] + [(i, i + 1) for i in range(10, 19)]
    (tmp_path / "edges.tsv").write_text("".join(f"{a}\t{b}\n{b}\t{a}\n" for a, b in edges))
    (tmp_path / "features.tsv").write_text("".join(f"{i % 3}\t{i % 5}\n" for i in range(20)))
    (tmp_path / "labels.txt").write_text("".join(f"{i % 2}\n" for i in range(20)))
    (tmp_path / "parts.txt").write_text("".join(f"{i // 10}\n" for i in range(20)))
    arguments = [
        "data=edges",
        f"data.path={tmp_path / 'edges.tsv'}",
        f"data.features={tmp_path / 'features.tsv'}",
        f"data.labels={tmp_path / 'labels.txt'}",
        "data.train_fraction=0.1",
        *EXACT,
    ]
    parts = ["data.partitioner=file", f"data.partition_path={tmp_path / 'parts.txt'}"]
    (single,) = sweep("strategy=single", "strategy.layers=plain", *arguments, name="single")
    for run in sweep("mode=1,2,3", "trainer.num_nodes=2", *parts, *arguments, name="sar"):
        assert run["store"]["halo"] == [0, 0]
        assert worst(single, run) < 1e-10
        assert all(rank["bytes_sent"] < 1e5 for rank in run["ranks"])


@pytest.mark.slow
def test_relations_over_ids(sweep: Runner, tmp_path: Path) -> None:
    """Without features a node is its id, which is another number in each part."""
    generator = random.Random(0)
    lines = [f"{generator.randrange(60)}\t{generator.randrange(60)}\tr{generator.randrange(4)}" for _ in range(500)]
    (tmp_path / "edges.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "labels.txt").write_text("\n".join(str(node % 3) for node in range(60)) + "\n")
    data = ["data=edges", f"data.path={tmp_path}/edges.tsv", f"data.labels={tmp_path}/labels.txt", "data.relation=2"]
    (single,) = sweep("strategy=single", "strategy.layers=plain", *data, "model=rgcn", *EXACT, name="single")
    for run in sweep("strategy=sar", "mode=1,3", "trainer.num_nodes=2", *data, "model=rgcn", *EXACT, name="sar"):
        assert worst(single, run) < 1e-10
