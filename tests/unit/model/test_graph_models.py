"""Encoders, relational networks and the link predictor, on small graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from given_data import Given, batches, opened
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCN

from gtrain.data.module import GraphDataModule
from gtrain.errors import ConfigError, DataError
from gtrain.model.candidate_ranks import ranks
from gtrain.model.classification import NodeClassifier
from gtrain.model.decoders import DECODERS, make_decoder
from gtrain.model.edge_model import Ranking
from gtrain.model.link_predictor import LinkPredictor
from gtrain.run import build

SHARED = {"hidden_channels": 8, "num_layers": 2, "dropout": 0.0}


def papers() -> HeteroData:
    """Papers with sparse features and labels, authors without features, venues with dense ones."""
    generator = torch.Generator().manual_seed(0)
    graph = HeteroData()
    graph["paper"].x = (torch.rand(40, 12, generator=generator) < 0.2).float().to_sparse_csr()
    graph["paper"].y = torch.arange(40) % 3
    graph["author"].num_nodes = 15
    graph["venue"].x = torch.randn(4, 5, generator=generator)
    for source, target, sizes in (("paper", "author", (40, 15)), ("paper", "venue", (40, 4))):
        index = torch.stack([torch.randint(0, n, (70,), generator=generator) for n in sizes])
        graph[source, "has", target].edge_index = index
        graph[target, "of", source].edge_index = index.flip(0)
    return graph


@pytest.mark.parametrize("target", ["gtrain.model.relational.HeteroSAGE", "gtrain.model.relational.HGT"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_heterogeneous_graph_is_learned_however_it_is_cut(target: str, parts: int, tmp_path: Path) -> None:
    module = opened(Given(papers(), tmp_path, num_parts=parts))
    torch.manual_seed(1)  # with 0, HGT stays for long at the loss of guessing, with dense features too
    model = build.make_model({"_target_": target, **SHARED, "test_metrics": None}, module.open_store())
    assert isinstance(model, NodeClassifier)
    (batch,) = batches(module)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []
    for _ in range(120):
        optimizer.zero_grad()
        loss, weight, scores, labels = model._loss(batch, "train")
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert scores.shape == (24, 3) and float(weight) == 24
    assert losses[-1] < 0.1 < losses[0]
    assert float((scores.argmax(1) == labels).double().mean()) == 1.0


def test_the_cut_does_not_change_the_scores(tmp_path: Path) -> None:
    found = []
    for parts in (1, 3):
        module = opened(Given(papers(), tmp_path, num_parts=parts))
        torch.manual_seed(0)
        settings = {"_target_": "gtrain.model.relational.HeteroSAGE", **SHARED}
        model = build.make_model(settings, module.open_store()).double().eval()
        (batch,) = batches(module, "predict")
        batch["paper"].x, batch["venue"].x = batch["paper"].x.double(), batch["venue"].x.double()
        scores = model(batch)[batch.seeds]
        assert torch.equal(batch["paper"].orig_id[batch.seeds], torch.arange(40))
        found.append(scores)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-13)


def relations(features: bool) -> Data:
    generator = torch.Generator().manual_seed(1)
    graph = Data(
        num_nodes=30,
        edge_index=torch.randint(0, 30, (2, 200), generator=generator),
        edge_type=torch.randint(0, 4, (200,), generator=generator),
        y=torch.arange(30) % 2,
    )
    if features:
        graph.x = torch.randn(30, 6, generator=generator)
    return graph


@pytest.mark.parametrize("features", [False, True])
def test_rgcn_reads_features_or_ids(features: bool, tmp_path: Path) -> None:
    module = opened(Given(relations(features), tmp_path))
    settings = {"_target_": "gtrain.model.relational.RGCN", **SHARED, "root_weight": False}
    model = build.make_model(settings, module.open_store())
    (batch,) = batches(module)
    assert model(batch).shape == (30, 2)
    first = model.network.convs[0]
    assert first.weight.shape == (4, 6 if features else 30, 8)
    # by hand: the mean over each relation's neighbours of their rows, summed over relations
    x = batch.x if features else torch.eye(30)[batch.orig_id]
    wanted = first.bias.expand(30, -1).clone()
    for relation in range(4):
        chosen = batch.edge_index[:, batch.edge_type == relation]
        for node in range(30):
            sources = chosen[0, chosen[1] == node]
            if len(sources):
                wanted[node] += (x[sources] @ first.weight[relation]).mean(0)
    given = batch.x if features else batch.orig_id
    torch.testing.assert_close(first(given, batch.edge_index, batch.edge_type), wanted, rtol=1e-4, atol=1e-5)


def test_a_network_for_the_other_kind_of_graph_is_refused(tmp_path: Path) -> None:
    plain = opened(Given(relations(True), tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"HeteroSAGE is a network for graphs with several types(.|\n)*gcn, sage"):
        settings = {"_target_": "gtrain.model.relational.HeteroSAGE", **SHARED}
        build.make_model(settings, plain.open_store())(batches(plain)[0])
    typed = opened(Given(papers(), tmp_path / "b"))
    with pytest.raises(ConfigError, match="relations"):
        build.make_model({"_target_": "gtrain.model.relational.RGCN", **SHARED}, typed.open_store())
    network = GCN(8, 8, 2, 3)
    with pytest.raises(ConfigError, match=r"one type of nodes and edges, and this graph has several types"):
        NodeClassifier(network, 3)(batches(typed)[0])


def test_features_are_learned_only_where_asked(tmp_path: Path) -> None:
    module = opened(Given(relations(False), tmp_path))
    settings = {"_target_": "gtrain.model.networks.gcn", **SHARED, "input_dropout": 0.0}
    with pytest.raises(ConfigError, match="model.learn_features=true"):
        build.make_model(settings, module.open_store())
    model = build.make_model({**settings, "learn_features": True}, module.open_store())
    assert model.encoder.layers["node"].weight.shape == (30, 8)
    assert model(batches(module)[0]).shape == (30, 2)


# ------------------------------------------------------------------------------------------------- links


class Fixed(nn.Module):
    """A network that returns its features."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x


def test_ranks_by_hand() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.5], [0.3, 0.3, 0.3, 0.3], [0.9, 0.8, 0.7, 0.6]])
    answer = torch.tensor([2, 0, 3])
    assert ranks(lambda rows, some: scores[rows][:, some], answer, None, None, 4).tolist() == [2.5, 2.5, 4.0]
    known_ptr, known = torch.tensor([0, 2, 3, 6]), torch.tensor([1, 2, 0, 0, 1, 3])
    found = ranks(lambda rows, some: scores[rows][:, some], answer, known_ptr, known, 4)
    assert found.tolist() == [1.5, 2.5, 2.0]
    metrics = {name: Ranking(name) for name in ("mrr", "hits@1", "hits@3")}
    for metric in metrics.values():
        metric.update(found)
        metric.update(found.new_zeros(0))
    values = {name: float(metric.compute()) for name, metric in metrics.items()}
    assert values == {"mrr": pytest.approx((1 / 1.5 + 1 / 2.5 + 1 / 2) / 3), "hits@1": 0.0, "hits@3": 1.0}


def test_ranks_do_not_depend_on_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (50, 20), generator=generator).float()
    answer, known = torch.randint(0, 20, (50,), generator=generator), torch.randint(0, 20, (150,), generator=generator)
    pointer = torch.arange(0, 151, 3)
    whole = ranks(lambda rows, some: scores[rows][:, some], answer, pointer, known, 20)
    monkeypatch.setattr("gtrain.model.candidate_ranks.TILE", 7)
    assert torch.equal(ranks(lambda rows, some: scores[rows][:, some], answer, pointer, known, 20), whole)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_scores_all_nodes_as_it_scores_one(name: str) -> None:
    torch.manual_seed(0)
    decoder = make_decoder(name, 6, 3).double()
    nodes, index = torch.randn(9, 6, dtype=torch.float64), torch.randint(0, 9, (2, 4))
    relation = torch.tensor([0, 2, 1, 2])
    head, tail = nodes[index[0]], nodes[index[1]]
    one = decoder(head, tail, relation)
    rows = torch.arange(4)
    torch.testing.assert_close(decoder.tails(head, relation, nodes)[rows, index[1]], one, rtol=0, atol=1e-12)
    torch.testing.assert_close(decoder.heads(tail, relation, nodes)[rows, index[0]], one, rtol=0, atol=1e-12)


def test_an_unknown_decoder_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="dot, distmult, mlp"):
        make_decoder("cosine", 4, None)


def two_groups(folder: Path) -> GraphDataModule:
    """A graph whose edges join nodes of one of two groups, with the group as the feature."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(40) % 2
    source = torch.randint(0, 40, (300,), generator=generator)
    target = (torch.randint(0, 20, (300,), generator=generator) * 2 + group[source]) % 40
    graph = Data(edge_index=torch.stack([source, target]), x=torch.eye(2)[group] * 4 - 2, num_nodes=40)
    return opened(Given(graph, folder, task="link", seed=3))


def test_validation_measures_what_can_be_computed_by_hand(tmp_path: Path) -> None:
    module = two_groups(tmp_path)
    (batch,) = batches(module, "test")
    model = LinkPredictor(Fixed(), make_decoder("dot", 2, None))
    model.test_step(batch, 0)
    scores = (batch.x @ batch.x.T).double()
    everything = {
        tuple(e)
        for split in ("train", "val", "test")
        for b in batches(module, split)
        for e in b.edge_label_index.t().tolist()
    }
    reciprocal = []
    for head, tail in batch.edge_label_index.t().tolist():
        for row, answer, edge in (
            (scores[head], tail, lambda n, h=head: (h, n)),
            (scores[:, tail], head, lambda n, t=tail: (n, t)),
        ):
            rivals = [n for n in range(40) if n != answer and edge(n) not in everything]
            better = sum(float(row[n] > row[answer]) for n in rivals)
            equal = sum(float(row[n] == row[answer]) for n in rivals)
            reciprocal.append(1 / (1 + better + equal / 2))
    assert float(model.test_ranks["mrr"].compute()) == pytest.approx(sum(reciprocal) / len(reciprocal), abs=1e-12)
    head, tail = batch.edge_label_index
    drawn = batch.dst_neg_index[:, 0]
    wanted = roc_auc_score(
        [1] * batch.batch_size + [0] * batch.batch_size, torch.cat([scores[head, tail], scores[head, drawn]])
    )
    assert float(model.test_auc.compute()) == pytest.approx(wanted, abs=1e-12)


def test_training_finds_the_groups(tmp_path: Path) -> None:
    module = two_groups(tmp_path)
    torch.manual_seed(0)
    settings = {"_target_": "gtrain.model.networks.sage", **SHARED, "task": "link", "decoder": "mlp"}
    model = build.make_model(settings, module.open_store())
    assert isinstance(model, LinkPredictor)
    optimizer = model.configure_optimizers()
    (batch,), (test,) = batches(module), batches(module, "test")
    for _ in range(80):
        optimizer.zero_grad()
        model.training_step(batch, 0)["loss"].backward()
        optimizer.step()
    model.test_step(test, 0)
    assert float(model.test_auc.compute()) > 0.7  # half of the random edges lie within a group as well: 0.75 at best


def test_links_between_types(tmp_path: Path) -> None:
    module = opened(Given(papers(), tmp_path, task="link", target="paper,has,author"))
    settings = {"_target_": "gtrain.model.relational.HeteroSAGE", **SHARED, "task": "link"}
    model = build.make_model(settings, module.open_store())
    (batch,) = batches(module)
    source, target = model(batch)
    assert source.shape == (40, 8) and target.shape == (15, 8)
    output = model.training_step(batch, 0)
    assert torch.isfinite(output["loss"]) and float(output["weight"]) == batch.batch_size


def test_missing_edge_types_are_said(tmp_path: Path) -> None:
    module = opened(Given(two_groups(tmp_path / "x").graph, tmp_path / "y"))
    (batch,) = batches(module, "predict")

    class Relational(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
            return x

    with pytest.raises(DataError, match="Relational needs edge_type"):
        NodeClassifier(Relational(), 2)(batch)
