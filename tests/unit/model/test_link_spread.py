"""Ranking among the nodes of all ranks is ranking among all nodes; rows of others come with their gradients."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import LIMIT
from sklearn.metrics import roc_auc_score
from torch import Tensor

from gtrain.data.batches.edge_seeds import KnownEdges
from gtrain.model import candidate_ranks as ranking
from gtrain.model.candidate_ranks import ranks
from gtrain.model.decoders import DECODERS, make_decoder
from gtrain.model.edge_model import Auc, spread_ranks
from gtrain.strategy.row_exchange import RowExchange

N, D = 30, 4


class World:
    """Ranks that are threads: what a group's collectives do, through a list."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.mail: dict[tuple[int, int, int], Tensor] = {}
        self.came = threading.Condition()

    def run(self, program: Callable[[FakeGroup], Any]) -> list[Any]:
        found: list[Any] = [None] * self.size

        def rank(number: int) -> None:
            try:
                found[number] = program(FakeGroup(self, number))
            except BaseException as error:
                found[number] = error
                self.barrier.abort()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        for value in found:
            if isinstance(value, BaseException) and not isinstance(value, threading.BrokenBarrierError):
                raise value
        return found


class FakeGroup:
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size, self._tag = world, rank, world.size, 0

    def next_tag(self) -> int:
        self._tag += 1
        return self._tag

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.world.slots[self.rank] = tensor.detach().clone()
        self.world.barrier.wait(LIMIT)
        found = list(self.world.slots)
        self.world.barrier.wait(LIMIT)
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self.all_gather(tensor)).sum(0))

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        with self.world.came:
            self.world.mail[self.rank, to, tag] = tensor.clone()
            self.world.came.notify_all()
        return Done()

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        key = (source, self.rank, tag)
        with self.world.came:
            assert self.world.came.wait_for(lambda: key in self.world.mail, 30), f"nothing came: {key}"
            tensor.copy_(self.world.mail.pop(key))
        return Done()


class Done:
    def wait(self) -> None:
        """It is."""


class Share:
    """A rank's part of a graph with one node type, for ``spread_ranks``."""

    def __init__(self, group: FakeGroup, offsets: list[int], index: Tensor, relation: Tensor, known: KnownEdges):
        self.group, self.rank, self.size = group, group.rank, group.size
        self.all_gather, self.all_reduce = group.all_gather, group.all_reduce
        begin, end = offsets[group.rank : group.rank + 2]
        self.mine = (index[1] >= begin) & (index[1] < end)
        self.source, self.target = index[:, self.mine]
        self.relation = relation[self.mine]
        self.first, self.num_own, self.known = (begin, begin), (end - begin, end - begin), known

    def rows(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("ranking reads own rows only")

    def known_targets(self, source: Tensor, relation: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.known.tails(source, relation)

    def known_sources(self, relation: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.known.heads(self.target, relation)


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("tile", [4, 1 << 10])
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("offsets", [[0, N], [0, 11, 30], [0, 9, 9, 30]])
def test_ranks_among_all_nodes_of_all_ranks(
    offsets: list[int], name: str, tile: int, filtered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers, so that scores tie exactly; one rank may own nothing; one node's embedding is no number."""
    monkeypatch.setattr(ranking, "TILE", tile)
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randint(-2, 3, (N, D), generator=generator).double()
    nodes[17] = torch.nan
    everything = torch.randint(0, N, (2, 120), generator=generator)
    relations = torch.randint(0, 3, (120,), generator=generator)
    index, relation = everything[:, :25], relations[:25]
    torch.manual_seed(0)
    decoder = make_decoder(name, D, 3).double()
    for parameter in decoder.parameters():
        parameter.data.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    whole = KnownEdges(everything, relations)

    def alone(score: Any, given: Tensor, answer: Tensor, known: tuple[Tensor, Tensor]) -> Tensor:
        lists = known if filtered else (None, None)
        return ranks(lambda rows, some: score(given[rows], relation[rows], nodes[some]), answer, *lists, N)

    with torch.no_grad():
        tails = alone(decoder.tails, nodes[index[0]], index[1], whole.tails(index[0], relation))
        heads = alone(decoder.heads, nodes[index[1]], index[0], whole.heads(index[1], relation))

    def program(group: FakeGroup) -> tuple[Tensor, Tensor, Tensor]:
        begin, end = offsets[group.rank : group.rank + 2]
        own = (everything[1] >= begin) & (everything[1] < end)
        share = Share(group, offsets, index, relation, KnownEdges(everything[:, own], relations[own], 3))
        given = nodes[share.source], nodes[share.target]
        candidates = nodes[begin:end], nodes[begin:end]
        with torch.no_grad():
            return (share.mine, *spread_ranks(decoder, share, candidates, given, share.relation, filtered))

    for mine, found_tails, found_heads in World(len(offsets) - 1).run(program):
        assert torch.equal(found_tails, tails[mine])
        assert torch.equal(found_heads, heads[mine])
    assert (tails % 1 == 0.5).any() or name == "mlp"  # there are ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DECODERS)
def test_scores_of_all_candidates_in_autocast_are_those_of_pairs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    decoder, rows = make_decoder(name, D, 3), torch.randn(N, D).to(dtype)
    relation = torch.arange(5) % 3
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        tails, heads = decoder.tails(rows[:5], relation, rows), decoder.heads(rows[:5], relation, rows)
        pairs = [(decoder(rows[:5], row, relation), decoder(row, rows[:5], relation)) for row in rows.unsqueeze(1)]
    for found, wanted in zip((tails, heads), zip(*pairs, strict=True), strict=True):
        torch.testing.assert_close(found.float(), torch.stack(wanted, 1).float(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("offsets", [[0, N], [0, 11, 30], [0, 9, 9, 30]])
def test_rows_of_other_ranks_come_with_gradients(offsets: list[int]) -> None:
    size = len(offsets) - 1
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(N, D, generator=generator, dtype=torch.float64)
    wanted = [torch.randint(0, N, (3, 7), generator=generator) for _ in range(size)]
    wanted[-1] = wanted[-1][:, :0]  # one rank reads nothing and is read
    weights = [torch.randn(*ids.shape, D, generator=generator, dtype=torch.float64) for ids in wanted]
    leaf = nodes.clone().requires_grad_()
    sum((leaf[ids] * weight).sum() for ids, weight in zip(wanted, weights, strict=True)).backward()

    def program(group: FakeGroup) -> Tensor:
        begin, end = offsets[group.rank : group.rank + 2]
        exchange = RowExchange(group, torch.tensor(offsets), wanted[group.rank])
        own = nodes[begin:end].clone().requires_grad_()
        rows = exchange.rows(own)
        local = exchange.local(wanted[group.rank])
        assert torch.equal(rows[local], nodes[wanted[group.rank]])
        ids = wanted[group.rank].unique()
        assert exchange.remote_ids.numel() == int(((ids < begin) | (ids >= end)).sum())  # each once, and no own ones
        (rows[local] * weights[group.rank]).sum().backward()
        return own.grad

    found = torch.cat(World(size).run(program))
    torch.testing.assert_close(found, leaf.grad, rtol=0, atol=1e-14)


# ------------------------------------------------------------------------------------------------------------ AUC


def test_auc_of_scores_of_any_size() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.randint(0, 9, (300,), generator=generator) / 3  # ties, and some batches within 0 .. 1
    false = torch.randint(-3, 7, (200,), generator=generator) / 3
    metric = Auc()
    for rows in (slice(0, 7), slice(7, 150), slice(150, 300)):
        metric.update(true[rows].sort().values, false[rows])
    metric.update(true[:0], false[:0])
    wanted = roc_auc_score([1] * 300 + [0] * 200, torch.cat([true, false]))
    assert float(metric.compute()) == pytest.approx(wanted, abs=1e-12)
    assert math.isnan(float(of_nothing()))
    metric.reset()
    metric.update(true, false[:0])
    assert math.isnan(float(metric.compute()))


def of_nothing() -> Tensor:
    metric = Auc()
    metric.update(torch.empty(0), torch.empty(0))
    return metric.compute()
