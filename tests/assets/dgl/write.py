"""Write the folders beside this file: python write.py, with DGL 1.1.3. The test knows the graphs by formula."""

from __future__ import annotations

from pathlib import Path

import dgl
import numpy as np
import torch

HERE = Path(__file__).parent


def homogeneous() -> dgl.DGLGraph:
    """24 nodes; node i points at 3i + 1 and 5i + 2, modulo 24."""
    ids = torch.arange(24)
    graph = dgl.graph((torch.cat([ids, ids]), torch.cat([(3 * ids + 1) % 24, (5 * ids + 2) % 24])), num_nodes=24)
    graph.ndata["feat"] = torch.stack([ids.float(), ids.float() / 2], dim=1)
    graph.ndata["label"] = ids % 3
    for name, first, last in (("train_mask", 0, 12), ("val_mask", 12, 18), ("test_mask", 18, 24)):
        graph.ndata[name] = (ids >= first) & (ids < last)
    graph.edata["weight"] = torch.arange(48).float()
    return graph


def heterogeneous() -> dgl.DGLHeteroGraph:
    """12 authors and 18 papers; author i writes papers i and i + 5, and paper i cites 7i + 3, modulo 18."""
    authors, papers = torch.arange(12), torch.arange(18)
    writes = authors.repeat(2), torch.cat([authors, (authors + 5) % 18])
    edges = {
        ("author", "writes", "paper"): writes,
        ("paper", "cites", "paper"): (papers, (7 * papers + 3) % 18),
        ("paper", "by", "author"): writes[::-1],
    }
    graph = dgl.heterograph(edges, num_nodes_dict={"author": 12, "paper": 18})
    graph.nodes["author"].data["feat"] = authors.float()[:, None]
    graph.nodes["paper"].data["feat"] = papers.float()[:, None] * 10
    graph.nodes["paper"].data["label"] = papers % 2
    graph.edges["cites"].data["year"] = 1990 + papers
    return graph


if __name__ == "__main__":
    dgl.random.seed(0)
    np.random.seed(0)
    dgl.distributed.partition_graph(homogeneous(), "small", 3, str(HERE / "homogeneous"), part_method="random")
    dgl.distributed.partition_graph(heterogeneous(), "small", 2, str(HERE / "heterogeneous"), part_method="metis")
    for path in HERE.rglob("graph.dgl"):  # DGL leaves what its memory held in the rest of the header
        content = bytearray(path.read_bytes())
        content[32:4096] = bytes(4096 - 32)
        path.write_bytes(content)
