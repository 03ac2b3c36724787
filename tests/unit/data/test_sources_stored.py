"""What the sources read, as a store of two parts gives it back: names, sparse features, held-out edges, types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gtrain.data.module import GraphDataModule
from gtrain.data.sources.kg import KGData
from gtrain.data.sources.libsvm import LibsvmData
from gtrain.data.sources.musae import MusaeData
from gtrain.data.sources.parquet import ParquetData
from gtrain.data.sources.temporal import TemporalData
from gtrain.graph.store import Store


def stored(cls: type[GraphDataModule], folder: Path, **options: Any) -> Store:
    """Prepare the store of a source, and open it."""
    module = cls(root=str(folder), store=str(folder / "stores"), num_parts=2, **options)
    module.prepare_data()
    assert module.store_path.is_dir()
    again = cls(root=str(folder), store=str(folder / "stores"), num_parts=2, **options)
    assert again.store_path == module.store_path  # reading changes nothing that identifies the graph
    return module.open_store()


def everywhere(store: Store, name: str, node_type: str | None = None) -> torch.Tensor:
    """A node tensor of all parts, dense, in the order of the source data."""
    pieces = [store.node(name, part, node_type) for part in range(2)]
    order = torch.cat([store.node("orig_id", part, node_type) for part in range(2)])
    whole = torch.cat([piece.to_dense() if piece.layout == torch.sparse_csr else piece for piece in pieces])
    return whole[torch.argsort(order)]


def test_a_knowledge_graph(tmp_path: Path) -> None:
    lines = [f"e{i}\tr{i % 3}\te{(i * 7 + 1) % 20}" for i in range(60)]
    splits = {"train": lines[:40], "valid": ["e3\tr1\te5", "e0\tr0\te19"], "test": ["e4\tr2\te4"]}
    train = [line.replace(f"e{i}\t", f"e{i % 20}\t", 1) for i, line in enumerate(splits["train"])]
    for name, rows in {**splits, "train": train}.items():
        (tmp_path / f"{name}.txt").write_text("".join(f"{row}\n" for row in rows))
    store = stored(KGData, tmp_path, path=".")
    entities, relations = store.names("node"), store.names("relation")
    assert entities is not None and relations is not None and (len(entities), len(relations)) == (20, 3)
    origin = torch.cat([store.node("orig_id", part) for part in range(2)])
    for split, wanted in (("val", splits["valid"]), ("test", splits["test"])):
        found = []
        for part in range(2):
            ends = [entities.decode(origin[store.held_out(end, part, split)].numpy()) for end in ("source", "target")]
            kinds = relations.decode(store.held_out("edge_type", part, split).numpy())
            found += ["\t".join(row) for row in zip(ends[0], kinds, ends[1], strict=True)]
        assert sorted(found) == sorted(wanted)
    assert store.facts["num_relations"] == 3 and store.num_edges == 40
    assert store.facts["split"]["sizes"] == {"train": 40, "val": 2, "test": 1}


def test_sparse_rows(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("".join(f"{i % 2 * 2 - 1} {i % 5 + 1}:{i + 1} 9:0.5\n" for i in range(20)))
    (tmp_path / "b").write_text("+1 2:7\n")
    store = stored(LibsvmData, tmp_path, path="a", test_path="b", val_fraction=0.25)
    wanted = np.zeros((21, 9))
    wanted[np.arange(20), np.arange(20) % 5] = np.arange(20) + 1
    wanted[:20, 8], wanted[20, 1] = 0.5, 7
    assert store.node("x", 0).layout == torch.sparse_csr
    assert everywhere(store, "x").tolist() == wanted.tolist()
    assert everywhere(store, "y").tolist() == [0, 1] * 10 + [1]
    assert everywhere(store, "test_mask").nonzero().flatten().tolist() == [20]
    assert store.facts["split"]["sizes"] == {"train": 15, "val": 5, "test": 1}
    assert (store.facts["num_features"], store.facts["num_classes"], store.facts["label_values"]) == (9, 2, [-1, 1])


def test_parquet_rows(tmp_path: Path) -> None:
    table = {"label": [0, 1] * 8, "price": list(range(16)), "city": ["a", "b", "c", "d"] * 4}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    store = stored(ParquetData, tmp_path, path="a.parquet", dense=["price"], categorical=["city"], buckets=50)
    x = everywhere(store, "x")
    assert x.shape == (16, 51) and x[:, 0].tolist() == table["price"] and x[:, 1:].sum(1).tolist() == [1] * 16
    assert torch.equal(x[:4, 1:], x[12:, 1:]) and x[:4, 1:].unique(dim=0).size(0) == 4


def test_a_social_network(tmp_path: Path) -> None:
    ids = [3 * i for i in range(12)]
    (tmp_path / "XY_edges.csv").write_text("a,b\n" + "".join(f"{a},{b}\n" for a, b in zip(ids, ids[1:], strict=False)))
    (tmp_path / "XY_features.json").write_text(str({str(i): [i // 3, 20] for i in ids}).replace("'", '"'))
    (tmp_path / "XY_target.csv").write_text("id,mature\n" + "".join(f"{i},{i % 2 == 0}\n" for i in ids))
    store = stored(MusaeData, tmp_path, name="XY", normalize_features=True)
    names = store.names("node")
    assert names is not None and names.decode(np.arange(12)) == [str(i) for i in ids]
    assert torch.equal(everywhere(store, "x").nonzero()[::2, 1], torch.arange(12))
    assert everywhere(store, "x").sum(1).tolist() == [1] * 12 and store.num_edges == 22


def test_events(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = np.stack([rng.integers(5, 25, 200), rng.integers(5, 25, 200), rng.permutation(200)], axis=1)
    np.savetxt(tmp_path / "events", rows, fmt="%d")
    store = stored(TemporalData, tmp_path, path="events")
    assert store.facts["split"]["sizes"] == {"train": 140, "val": 30, "test": 30}
    times = {"train": [store.edge("edge_time", part) for part in range(2)]}
    times |= {split: [store.held_out("edge_time", part, split) for part in range(2)] for split in ("val", "test")}
    found = {split: sorted(torch.cat(pieces).tolist()) for split, pieces in times.items()}
    assert found == {"train": list(range(140)), "val": list(range(140, 170)), "test": list(range(170, 200))}
    names = store.names("node")
    assert names is not None and names.encode(["5", "24", "4"]).tolist() == [0, 19, -1]
