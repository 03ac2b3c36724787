"""gtrain.data.batches.sampling and gtrain.graph.sampling.options: options of sampling and their errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_graphs import messy_graph, random_parts, stored
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.loader import SeedLoader
from gtrain.data.batches.sampling import Sampling, seed_time
from gtrain.data.planted import PlantedData
from gtrain.errors import ConfigError, DataError
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE
from gtrain.graph.store.writer import write_store

WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")


def store_of(path: Path, **changed: Any) -> Store:
    """A store of a small graph without times of its edges; None takes a tensor away."""
    data = messy_graph()
    for name, value in changed.items():
        if value is None:
            del data[name]
        else:
            data[name] = value
    return stored(path / "store", data, random_parts(40, 3))


def typed_store(path: Path) -> Store:
    """Authors write papers, papers cite papers; citations have times and weights."""
    data = HeteroData()
    data["author"].x, data["paper"].x = torch.ones(4, 2), torch.ones(5, 3)
    data[WRITES].edge_index = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])
    data[CITES].edge_index = torch.tensor([[0, 1, 2], [1, 2, 4]])
    data[CITES].edge_time, data[CITES].edge_weight = torch.arange(3), torch.tensor([1.0, 0.0, 2.0])
    parts = {"author": torch.tensor([0, 0, 1, 1]), "paper": torch.tensor([0, 1, 1, 0, 0])}
    return write_store(path / "typed", data, parts, 2, source={}, facts={}, partitioner="file", seed=0)


# ------------------------------------------------------------------------------------------------------- options


def test_fan_outs_by_edge_type_are_written_in_three_ways() -> None:
    for key in (WRITES, "author,writes,paper", "author__writes__paper", "author, writes, paper"):
        options = SamplingOptions({key: [5, -1], "default": [1, 0]})
        assert options.fan_out([WRITES, CITES]) == {WRITES: (5, -1), CITES: (1, 0)}
        assert options.num_hops == 2
    assert SamplingOptions([3, 2]).fan_out([WRITES, CITES]) == {WRITES: (3, 2), CITES: (3, 2)}
    assert SamplingOptions([]).num_hops == SamplingOptions({}).num_hops == 0


def test_what_follows_from_options() -> None:
    assert not SamplingOptions([1]).disjoint
    assert SamplingOptions([1], temporal="last", edge_time="edge_time").disjoint
    assert [SamplingOptions([1], subgraph_type=kind).trimmable for kind in ("directional", "bidirectional")] == [1, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingOptions(5), r"num_neighbors=5 is not a list"),
        (lambda: SamplingOptions("5,5"), r"num_neighbors='5,5' is not a list"),
        (lambda: SamplingOptions([5, "a"]), r"num_neighbors holds 'a'"),
        (lambda: SamplingOptions([5, True]), r"num_neighbors holds True"),
        (lambda: SamplingOptions([5, -2]), r"num_neighbors holds -2"),
        (lambda: SamplingOptions({"a,b": [5]}), r"has a list for 'a,b', which is not an edge type"),
        (lambda: SamplingOptions({7: [5]}), r"has a list for 7, which is not an edge type"),
        (lambda: SamplingOptions({WRITES: [5], "default": [5, 5]}), r"different lengths \(author,writes,paper: 1;"),
        (lambda: SamplingOptions({WRITES: [5]}).fan_out([WRITES, CITES]), "leaves out paper,cites,paper"),
        (lambda: SamplingOptions({WRITES: [5], CITES: [5]}).fan_out([CITES]), "names author,writes,paper, which"),
        (
            lambda: SamplingOptions([1], subgraph_type="all"),
            "subgraph_type=all is not an option.*HINT: choose directional",
        ),
        (lambda: SamplingOptions([1], temporal="first", node_time="time"), "temporal_strategy=first.*choose uniform"),
        (lambda: SamplingOptions([1], temporal="last"), "node_time=None and edge_time=None"),
        (lambda: Sampling(subgraph_type="half"), "subgraph_type=half"),
        (lambda: Sampling(temporal_strategy="next"), "temporal_strategy=next"),
        (lambda: Sampling(temporal_strategy="last", weight_attr="edge_weight"), "regardless of weights"),
        (lambda: Sampling(time_attr="edge_time"), "time_attr=edge_time was set without data.temporal_strategy"),
        (lambda: Sampling(temporal_strategy="last", time_attr="year"), "time_attr=year was set.*choose time"),
        (lambda: Sampling(neg_sampling="pairs"), "neg_sampling=pairs was set"),
        (lambda: Sampling(neg_sampling="binary", neg_sampling_ratio=0), "neg_sampling_ratio=0 was set"),
        (lambda: Sampling(neg_sampling="triplet", neg_sampling_ratio=1.5), "neg_sampling_ratio=1.5 was set"),
        (lambda: Sampling(neg_sampling_ratio=2), "neg_sampling_ratio=2 was set without data.neg_sampling"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + message):
        make()


# -------------------------------------------------------------------------------------------- against a graph


def test_times_are_those_of_nodes_or_else_of_edges(tmp_path: Path) -> None:
    times = torch.arange(300)
    both, edges = store_of(tmp_path / "1", edge_time=times), store_of(tmp_path / "2", edge_time=times, time=None)
    found = Sampling(temporal_strategy="last").options(both, (2,))
    assert (found.temporal, found.node_time, found.edge_time) == ("last", "time", None)
    found = Sampling(temporal_strategy="last", time_attr="edge_time").options(both, (2,))
    assert (found.node_time, found.edge_time) == (None, "edge_time")
    found = Sampling(temporal_strategy="uniform").options(edges, (2,))
    assert (found.node_time, found.edge_time) == (None, "edge_time")
    assert seed_time(edges, found, EDGE_TYPE) == "edge_time"
    assert seed_time(edges, SamplingOptions([2]), "node") is None
    with pytest.raises(DataError, match=r"the seeds are nodes, and the data have no time\."):
        seed_time(edges, found, "node")
    typed = typed_store(tmp_path)
    found = Sampling(temporal_strategy="uniform").options(typed, (2,))
    with pytest.raises(DataError, match="the seeds are edges author,writes,paper, and the data have no edge_time"):
        seed_time(typed, found, WRITES)


def test_times_that_are_missing_are_named(tmp_path: Path) -> None:
    nodes, nothing = store_of(tmp_path / "1"), store_of(tmp_path / "2", time=None)
    with pytest.raises(DataError, match="temporal_strategy=last was set.* neither its nodes nor its edges have times"):
        Sampling(temporal_strategy="last").options(nothing, (2,))
    with pytest.raises(DataError, match="(?s)time_attr=edge_time was set .* its nodes alone have times"):
        Sampling(temporal_strategy="last", time_attr="edge_time").options(nodes, (2,))


def test_weights_are_looked_up_and_checked(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    assert Sampling(weight_attr="edge_weight").options(store, (2,)).weight == "edge_weight"
    with pytest.raises(DataError, match="(?s)weight_attr=w was set.*no such tensor.*they have .*edge_weight"):
        Sampling(weight_attr="w").options(store, (2,))
    with pytest.raises(DataError, match="weight_attr=edge_attr was set; that tensor is torch.int64 with 2 dimensions"):
        Sampling(weight_attr="edge_attr").options(store, (2,))


def test_fan_outs_have_a_number_for_each_layer(tmp_path: Path) -> None:
    store, typed = store_of(tmp_path), typed_store(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)=\[5\] draws 1 hop, .* 3 times.*num_neighbors=\[15,10,5\]"):
        Sampling().options(store, (5,), hops=3)
    with pytest.raises(ConfigError, match=r"=\{author,writes,paper:\[5,5\],default:\[1,1\]\} draws 2 hops"):
        Sampling().options(typed, {WRITES: (5, 5), "default": (1, 1)}, hops=3)
    assert Sampling().options(store, (5, 5, 5), hops=2).num_neighbors == (5, 5, 5)
    assert Sampling().options(store, None, hops=2).num_neighbors == (-1, -1)
    with pytest.raises(ConfigError, match="num_neighbors=null was set, and how many hops the model looks is unknown"):
        Sampling().options(store, None)
    with pytest.raises(ConfigError, match="by edge type, and the graph has one type"):
        Sampling().options(store, {"default": (1,)})
    with pytest.raises(ConfigError, match="leaves out paper,cites,paper"):
        Sampling().options(typed, {WRITES: (1,)})


# ------------------------------------------------------------------------------------------- on the way to a strategy


def test_a_loader_carries_the_settings_of_its_data_module(tmp_path: Path) -> None:
    common = {"root": tmp_path, "store": tmp_path, "num_nodes": 60, "num_edges": 200, "num_parts": 2}
    module = PlantedData(
        **common, num_neighbors={"default": [4, 3]}, replace=True, subgraph_type="induced", disjoint=True
    )
    module.prepare_data()
    loader = module.train_dataloader()
    assert loader.sampling == Sampling(replace=True, subgraph_type="induced", disjoint=True)
    with pytest.raises(ConfigError, match="one type of edges"):
        loader.sampling_options(2)
    assert PlantedData(**common, replace=True).store_path == module.store_path  # the graph is the same
    assert module.work == (module.num_seeds("train"), "seeds/s")
    with pytest.raises(ConfigError, match=r"num_neighbors=\{default:\[4,3\]\}, data.replace=True, .* is set, and this"):
        next(iter(loader))


@pytest.mark.parametrize("sampling", [{"replace": True}, {"temporal_strategy": "last"}, {"weight_attr": "edge_weight"}])
def test_a_strategy_that_takes_all_neighbours_ignores_nothing(sampling: Any, tmp_path: Path) -> None:
    (name,) = sampling
    loader = SeedLoader(store_of(tmp_path), "train", sampling=Sampling(**sampling))
    with pytest.raises(ConfigError, match=f"(?s)data.{name}=.* is set.*HINT: leave data.{name} out"):
        next(iter(loader))


def test_false_edges_are_for_links() -> None:
    with pytest.raises(ConfigError, match="neg_sampling=binary was set, and data.task=node"):
        PlantedData(neg_sampling="binary")
    assert PlantedData(neg_sampling="triplet", neg_sampling_ratio=2, task="link").sampling.neg_sampling_ratio == 2


@pytest.mark.slow
def test_options_are_light() -> None:
    """The data module imports them, and the agent the data module."""
    code = "import sys, gtrain.data.module; print('gtrain.graph.sampling.spans' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_graph_without_more_is_enough(tmp_path: Path) -> None:
    """No tensor but the structure is looked at where nothing is asked for."""
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    store = stored(tmp_path / "bare", data, torch.tensor([0, 1]))
    options = SeedLoader(store, "predict", num_neighbors=[2]).sampling_options(1)
    assert options == SamplingOptions((2,))
