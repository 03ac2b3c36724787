"""``gtrain plan`` against the runs that it plans."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import forked
import pytest
from helpers import ok, summary

DATA = ("data=planted", "data.num_nodes=2000", "data.num_edges=24000", "data.num_features=24")
RUN = ("trainer.max_epochs=3", "logger=none", "trainer.enable_progress_bar=false", "trainer.num_nodes=2")


def planned(folder: Path, *overrides: str) -> dict[str, Any]:
    """``plan.json`` of these settings, with its rows by title."""
    ok(forked.gtrain("plan", *overrides, "hydra.run.dir=planned", cwd=folder))
    plan = json.loads((folder / "planned" / "plan.json").read_text())
    names = [" ".join([row["strategy"], *map(str, row["variant"].values())]) for row in plan["rows"]]
    return {**plan, "rows": dict(zip(names, plan["rows"], strict=True))}


def test_the_least_machines_are_told_beside_the_plan_of_those_that_were_asked_for(tmp_path: Path) -> None:
    plan = planned(tmp_path, *DATA, *RUN, "model=sage", "plan.least=true")
    row = plan["rows"]["sar 1"]
    assert (row["ranks"], row["least_machines"]) == (2, 1)
    assert plan["rows"]["sar 1"] == {
        **planned(tmp_path, *DATA, *RUN, "model=sage")["rows"]["sar 1"],
        "least_machines": 1,
    }


def test_a_strategy_whose_defaults_do_not_fit_the_machines_is_left_out(tmp_path: Path) -> None:
    data = ("data=planted_kg", "data.num_entities=300", "data.num_triples=2500", "model=kg", "data.batch_size=500")
    plan = planned(tmp_path, *data, *RUN)
    assert {"ps", "single"} <= set(plan["rows"]) and "num_partitions=1 were set" in plan["not_served"]["pbg"]


@pytest.mark.parametrize(
    "model",
    [
        ("model=sage", "model.num_layers=3"),
        pytest.param(("model=gcn",), marks=pytest.mark.slow),
        pytest.param(("model=gat", "model.input_dropout=0"), marks=pytest.mark.slow),
        pytest.param(("model=gin",), marks=pytest.mark.slow),
        pytest.param(("model=link_sage",), marks=pytest.mark.slow),
    ],
    ids=lambda model: model[0],
)
def test_sar_sends_the_planned_bytes(model: tuple[str, ...], tmp_path: Path) -> None:
    row = planned(tmp_path, *DATA, *model, *RUN)["rows"]["sar 1"]
    ok(forked.gtrain("strategy=sar", *DATA, *model, *RUN, "hydra.run.dir=run", cwd=tmp_path))
    ranks = summary(tmp_path / "run")["ranks"]
    most = max(rank["bytes_sent"] for rank in ranks) / 3
    assert row["sent_bytes_per_epoch"] == pytest.approx(most, rel=0.02)
    assert row["memory_bytes"] == pytest.approx(max(rank["peak_anonymous_bytes"] for rank in ranks), rel=0.2)


def assert_planned(folder: Path, row: str, *overrides: str) -> None:
    """Three epochs send the planned bytes within 5 %, and need the planned memory within 20 %, of ranks and servers."""
    plan = planned(folder, *overrides, *RUN)["rows"][row]
    strategy, _, mode = row.partition(" ")
    several = [] if strategy == "single" else RUN[-1:]
    run = (f"strategy={strategy}", *([f"mode={mode}"] if mode else []), *overrides, *RUN[:-1], *several)
    ok(forked.gtrain(*run, "hydra.run.dir=run", cwd=folder))
    ranks = summary(folder / "run")["ranks"]
    workers, servers = ([rank for rank in ranks if (rank["role"] == "worker") is worker] for worker in (True, False))
    sent = max(rank["bytes_sent"] for rank in workers) / 3
    assert plan["sent_bytes_per_epoch"] == pytest.approx(sent, rel=0.05)
    assert plan["memory_bytes"] == pytest.approx(max(rank["peak_anonymous_bytes"] for rank in workers), rel=0.2)
    if servers:
        memory = max(rank["peak_anonymous_bytes"] for rank in servers)
        assert plan["server_memory_bytes"] == pytest.approx(memory, rel=0.2)


WRITES = ("model.task=link", "data.target=author__writes__paper")
SERVED = "model.sparse_optimizer={_target_:gtrain.nn.RowwiseAdagrad,lr:0.1}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ("sar 1", ("model=hetero_sage",)),
        ("pyg", ("model=hetero_sage", "data.batch_size=512", "data.num_neighbors=[10,5]")),
        ("single", ("model=hetero_sage", *WRITES)),
        ("sar 1", ("model=hetero_sage", *WRITES)),
        ("sar 3", ("model=hgt", "model.task=link", "data.target=paper__cites__paper")),
        ("pyg", ("model=hetero_sage", *WRITES, "data.batch_size=512", "data.num_neighbors=[10,5]")),
    ],
    ids=["sar", "pyg", "edges, single", "edges, sar", "edges of one type, sar", "edges, pyg"],
)
def test_graphs_of_several_types_cost_what_is_planned(row: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    assert_planned(tmp_path, row, "data=planted_hetero", *settings)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["single", "sar 1", "pyg"])
def test_relational_layers_over_ids_cost_what_is_planned(row: str, tmp_path: Path) -> None:
    """R-GCN without features: 8 million learned numbers, which are most of the memory and of the bytes."""
    draw = random.Random(0).randrange
    nodes, relations = 2000, 60
    lines = [f"{draw(nodes)},{draw(nodes)},r{draw(relations)}" for _ in range(12_000)]
    (tmp_path / "edges.csv").write_text("source,target,kind\n" + "\n".join(lines) + "\n")
    (tmp_path / "nodes.csv").write_text("id,label\n" + "".join(f"{node},{node % 4}\n" for node in range(nodes)))
    tables = ["data=tables", "data.nodes={path: nodes.csv, label: label}"]
    tables += ["data.edges={path: edges.csv, relation: kind}"]
    assert_planned(tmp_path, row, *tables, "model=rgcn", "model.hidden_channels=64")


SAMPLED = ("data.batch_size=400", "data.num_neighbors=[10,5]")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("model=sage",),
        ("model=sage", *SAMPLED),
        ("model=gcn", *SAMPLED, "strategy.servers=1", "strategy.protocol=pull", "data.num_features=1000"),
    ],
    ids=["whole graph", "sampled", "sampled, rows fetched"],
)
def test_graphs_on_servers_cost_what_is_planned(settings: tuple[str, ...], tmp_path: Path) -> None:
    assert_planned(tmp_path, "ps", *DATA, *settings, "data.feature_layout=sparse", SERVED)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "servers"), [("sage", 2), ("gat", 1)])
def test_sampled_rows_of_nodes_cost_what_is_planned(model: str, servers: int, tmp_path: Path) -> None:
    """Learned rows: a step reads those of the nodes of its batch."""
    draw = random.Random(0).randrange
    (tmp_path / "edges.tsv").write_text("".join(f"{draw(6000)}\t{draw(6000)}\n" for _ in range(60_000)))
    (tmp_path / "labels.tsv").write_text("".join(f"{node}\t{node % 4}\n" for node in range(6000)))
    data = ("data=edges", f"data.path={tmp_path}/edges.tsv", f"data.labels={tmp_path}/labels.tsv")
    learned = (f"model={model}", "model.learn_features=true", SERVED, f"strategy.servers={servers}")
    assert_planned(tmp_path, "ps", *data, *learned, *SAMPLED)


@pytest.mark.slow
def test_pyg_requests_the_planned_rows(tmp_path: Path) -> None:
    """Rows, neighbours and numbers of edges travel between ranks that do not share memory."""
    batches = ("data.batch_size=400", "data.num_neighbors=[10,5]", "strategy.transport=tcp", "strategy=pyg")
    assert_planned(tmp_path, "pyg", *DATA, "model=sage", *batches)


@pytest.mark.slow
def test_pyg_sends_the_planned_bytes_of_edges(tmp_path: Path) -> None:
    """Without validation, which the plan does not count."""
    edges = ("model=link_sage", "data.batch_size=1000", "data.num_neighbors=[10,5]")
    short = ("trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
    row = planned(tmp_path, *DATA, *edges, *RUN)["rows"]["pyg"]
    ok(forked.gtrain("strategy=pyg", *DATA, *edges, *RUN, *short, "hydra.run.dir=run", cwd=tmp_path))
    most = max(rank["bytes_sent"] for rank in summary(tmp_path / "run")["ranks"]) / 3
    assert row["sent_bytes_per_epoch"] == pytest.approx(most, rel=0.02)


@pytest.mark.slow
def test_workers_pull_the_planned_rows_where_some_columns_are_in_most_rows(tmp_path: Path) -> None:
    draw = random.Random(0)
    with open(tmp_path / "rows.svm", "w") as rows:
        for _ in range(4000):
            columns = {int(draw.paretovariate(0.6)) for _ in range(25)}
            ids = " ".join(f"{column}:{draw.random():.3f}" for column in sorted(columns) if column <= 20_000)
            rows.write(f"{draw.randrange(2)} {ids}\n")
    data = ("data=libsvm", "data.path=rows.svm", "model=sparse", "data.batch_size=400")
    assert_planned(tmp_path, "ps", *data, "strategy=ps", "strategy.protocol=pull", "trainer.limit_val_batches=0")
