"""Weights, features, relations and times of edges: what each model reads, as docs/models.md tells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from given_data import Given, batches, opened
from helpers import REPO
from omegaconf import OmegaConf
from torch_geometric.data import Data, HeteroData

from gtrain import SingleStrategy, config
from gtrain.data.sources.edges import EdgesData
from gtrain.errors import DataError
from gtrain.model.inputs import EDGE_DATA, check_weights, edge_data_read, unread_data, weight_demand
from gtrain.run import build

NODES, EDGES, COLUMNS = 24, 120, 3


def documented() -> dict[str, list[str]]:
    """The rows of the table by model: what it reads of each of EDGE_DATA, and what becomes of negative weights."""
    section = (REPO / "docs/models.md").read_text().split("## Edge data")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert rows[0] == ["`model=`", *(f"`{name}`" for name in EDGE_DATA), "negative weights"]
    return {model: row[1:] for row in rows[2:] for model in re.findall(r"`(\w+)`", row[0])}


TABLE = documented()
WITH = {"edge_dim": {"edge_dim": COLUMNS}, "decoder": {"decoder": "distmult"}}
"""Settings that the table names as conditions."""


def conditions(model: str) -> dict[str, dict[str, Any]]:
    """Edge data that a model reads with a setting alone, and the setting."""
    conditional = {
        name: re.match(r"with `\+?model\.(\w+)=", cell) for name, cell in zip(EDGE_DATA, TABLE[model], strict=False)
    }
    return {name: WITH[match[1]] for name, match in conditional.items() if match}


def edge_data(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "edge_weight": torch.rand(EDGES, generator=generator) + 0.1,
        "edge_attr": torch.randn(EDGES, COLUMNS, generator=generator),
        "edge_type": torch.cat([torch.arange(3), torch.randint(0, 3, (EDGES - 3,), generator=generator)]),
        "edge_time": torch.randint(0, 1000, (EDGES,), generator=generator).sort().values,
    }


def graph(model: str, changed: str | None) -> Data | HeteroData:
    """A graph with everything that edges may have; ``changed`` is what has other values."""
    generator, tensors = torch.Generator().manual_seed(0), edge_data(1)
    if changed is not None:
        tensors[changed] = edge_data(2)[changed]
    x, y = torch.randn(NODES, 8, generator=generator), torch.arange(NODES) % 3
    index = torch.randint(0, NODES, (2, EDGES), generator=generator)
    if model not in ("hetero_sage", "hgt"):
        return Data(x=x, y=y, edge_index=index, **tensors)
    made = HeteroData()
    made["paper"].x, made["paper"].y, made["author"].x = x, y, x.flip(0)
    for ends in (("paper", "of", "author"), ("author", "writes", "paper")):
        made[ends].edge_index = index
        for name, values in tensors.items():
            made[ends][name] = values
    return made


def settings(model: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """The settings of conf/model, small and without chance."""
    config.register()
    loaded = OmegaConf.create({"model": OmegaConf.load(REPO / f"conf/model/{model}.yaml")})
    found = OmegaConf.to_container(loaded, resolve=True)["model"]  # type: ignore[call-overload, index]
    small = {"hidden_channels": 8, "dropout": 0.0, "input_dropout": 0.0, "dimension": 8, "all_negs": True, "heads": 2}
    small |= {"init_scale": 1.0, "relation_init_scale": 0.5}  # operators begin alike by default
    found |= {key: value for key, value in small.items() if key in found} | overrides
    return found | ({"out_channels": 8} if "out_channels" in found else {})


def trained(model: str, changed: str | None, folder: Path, overrides: dict[str, Any]) -> tuple[Any, float]:
    """The model, and its loss on the first batch."""
    given = settings(model, overrides)
    module = opened(Given(graph(model, changed), folder / str(changed), task=given["task"]))
    torch.manual_seed(0)
    made = build.make_model(given, module.open_store())
    if overrides.get("decoder") == "distmult":
        made.decoder.weight.data[1] *= 2  # vectors of relations begin alike
    (batch,) = batches(module)
    torch.manual_seed(1)
    return made, float(made.training_step(batch, 0)["loss"].detach())


@pytest.mark.parametrize("model", TABLE)
def test_each_row_of_the_table_is_what_training_does(model: str, tmp_path: Path) -> None:
    if model.startswith("dgl_"):
        pytest.importorskip("dgl", reason="this model needs dgl")
    asked = conditions(model)
    for number, overrides in enumerate([{}, *asked.values()]):
        folder = tmp_path / str(number)
        made, before = trained(model, None, folder, overrides)
        for name, cell in zip(EDGE_DATA, TABLE[model], strict=False):
            changes = trained(model, name, folder, overrides)[1] != before
            told = cell != "no" and (name not in asked or asked[name] == overrides)
            assert changes == told == (name in (edge_data_read(made) or ())), (model, overrides, name, cell)


@pytest.mark.parametrize("model", [model for model, row in TABLE.items() if not model.startswith("dgl_")])
def test_negative_weights_are_refused_where_the_table_says_so(model: str, tmp_path: Path) -> None:
    made, _ = trained(model, None, tmp_path, {})
    facts = {"negative_weight": "edges.txt, line 7: the weight is -2", "edge_weights": [-2.0, 1.0]}
    if TABLE[model][4] != "refused":
        check_weights(made, facts, f"model={model}")
        return
    with pytest.raises(DataError, match=rf"edges\.txt, line 7: the weight is -2, and model={model} takes weights of 0"):
        check_weights(made, facts, f"model={model}")
    check_weights(made, {"edge_weights": [0.0, 1.0]}, f"model={model}")
    if model == "gcn":
        check_weights(made, {"edge_weights": [0.0, 0.0]}, f"model={model}")  # each node still has itself
        return
    with pytest.raises(DataError, match="all edge weights are 0"):
        check_weights(made, {"edge_weights": [0.0, 0.0]}, f"model={model}")


def test_signed_weights_of_a_convolution_that_sums(tmp_path: Path) -> None:
    made, _ = trained("gcn", None, tmp_path, {})
    facts = {"negative_weight": "edges.txt, line 7: the weight is -2"}
    for layer in made.network.convs:
        layer.normalize = False
    check_weights(made, facts, "GCN")
    assert weight_demand(made, "GCN") is None


def test_what_nothing_reads_is_listed(tmp_path: Path) -> None:
    made, _ = trained("sage", None, tmp_path, {})
    given = graph("sage", None)
    given.time = torch.arange(NODES)
    store = opened(Given(given, tmp_path / "timed")).open_store()
    assert [sentence.partition(", so")[0] for sentence in unread_data(made, store, set(), "SAGE")] == [
        *(f"SAGE does not read {name}" for name in EDGE_DATA),
        "SAGE does not read the time of nodes",
    ]
    (only,) = unread_data(made, store, {"edge_attr", "edge_type", "edge_time", "time"}, "SAGE")
    assert only.startswith("SAGE does not read edge_weight, so")
    assert unread_data(torch.nn.Linear(1, 1), store, set(), "Linear") == []  # a module of the user's own


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({}, set()),
        ({"split": "time"}, {"time"}),
        ({"split": "time", "task": "link"}, {"edge_time"}),
        ({"temporal_strategy": "last"}, {"time", "edge_time"}),
        ({"temporal_strategy": "last", "time_attr": "time"}, {"time"}),
        ({"temporal_strategy": "last", "time_attr": "time", "task": "link"}, {"time", "edge_time"}),
        ({"weight_attr": "edge_weight"}, {"edge_weight"}),
    ],
)
def test_what_the_split_and_the_sampling_read(options: dict[str, Any], read: set[str], tmp_path: Path) -> None:
    assert Given(graph("sage", None), tmp_path, **options).edge_data_read == read


@pytest.mark.slow
def test_a_trainer_of_python_checks_edge_data_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fit(model: str, given: Data) -> None:
        data = Given(given, tmp_path / "fit")
        made, _ = trained(model, None, tmp_path / model, {})
        strategy = SingleStrategy()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, limit_val_batches=0, **quiet)
        trainer.fit(made, datamodule=data)
        trainer.test(made, datamodule=data, verbose=False)

    given = graph("gcn", None)
    given.edge_weight[5] = -3.0
    with pytest.raises(DataError, match=r"the weight of edge 5 .* is -3, and GCN takes weights of 0 or more: GCNConv"):
        fit("gcn", given)
    assert not list(tmp_path.glob("fit/*")), "no store is made"
    caplog.clear()
    fit("sage", given)
    told = [text for text in caplog.messages if "does not read" in text]
    assert [text.partition(", so")[0] for text in told] == [f"GraphSAGE does not read {name}" for name in EDGE_DATA]
    with pytest.raises(DataError, match="GCN takes weights of 0 or more"):
        fit("gcn", given)  # from the store


@pytest.mark.parametrize("suffix", ["txt", "parquet"])
def test_the_first_negative_weight_is_known_by_its_line(suffix: str, tmp_path: Path) -> None:
    rows = [(0, 1, 0.5), (1, 2, 0.0), (2, 0, -1.5), (2, 3, -2.0), (3, 0, 1.0)]
    path = tmp_path / f"edges.{suffix}"
    if suffix == "txt":
        path.write_text("# made by hand\n" + "".join(f"{s} {t} {w}\n" for s, t, w in rows))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = [list(column) for column in zip(*rows, strict=True)]
        pq.write_table(pa.table(dict(zip(("source", "target", "weight"), columns, strict=True))), path)
    for undirected in (False, True):
        module = EdgesData(path=str(path), undirected=undirected, store=str(tmp_path), task="link")
        module.prepare_data()
        where = "line 4" if suffix == "txt" else r"row 2 \(from 0\)"
        assert re.search(rf"edges\.{suffix}, {where}: the weight is -1\.5", module.facts["negative_weight"])
        assert module.facts["edge_weights"] == [-2.0, 1.0]
        module = EdgesData(path=str(path), undirected=undirected, store=str(tmp_path / "none"), task="link")
        module.weight_demand = lambda _: "GCN takes none"
        with pytest.raises(DataError, match=rf"edges\.{suffix}, {where}: the weight is -1\.5, and GCN takes none\."):
            module.read()


def test_a_source_without_lines_names_the_edge(tmp_path: Path) -> None:
    given = graph("gcn", None)
    given.edge_weight[5] = -3.0
    assert opened(Given(given, tmp_path)).facts["negative_weight"] == "given: the weight of edge 5 (from 0) is -3"
    held = graph("gcn", None)
    held.update({"val_edge_index": held.edge_index, "val_edge_weight": -held.edge_weight, "edge_weight": None})
    facts = opened(Given(held, tmp_path / "held", task="link", split="public")).facts
    assert re.match(r"given: the weight of val edge 0 \(from 0\) is -", facts["negative_weight"])
