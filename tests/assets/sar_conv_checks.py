"""What exactness alone does not show: dropout that replays, messages and bytes, batch norm far from zero."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from sar_conv_bench import Bench, difference, gradient_of, weights
from sar_conv_cases import Case, View
from sar_conv_graphs import EDGES, NODES, view
from torch import Tensor, nn

from gtrain.strategy.group import Group


class Sends:
    """Sizes in bytes of the messages that a group sends meanwhile."""

    def __init__(self, group: Group) -> None:
        self._group, self.sizes = group, []  # type: tuple[Group, list[int]]

    def __enter__(self) -> list[int]:
        send = self._group.send

        def counted(tensor: Tensor, to: int, tag: int) -> Any:
            self.sizes.append(tensor.nbytes)
            return send(tensor, to, tag)

        self._group.send = counted  # type: ignore[method-assign]
        return self.sizes

    def __exit__(self, *_: object) -> None:
        del self._group.send  # type: ignore[method-assign]


class Dropping:
    """Whether the gradient under dropout is that of the function which the same seed gives again."""

    STEP = 1e-6

    def __init__(self, bench: Bench, case: Case) -> None:
        self.bench, self.case = bench, case
        torch.manual_seed(1)
        self.net = case.make().double()

    def run(self, modes: list[int]) -> dict[str, Any]:
        return {f"mode {mode}": self._in_mode(mode) for mode in modes}

    def _in_mode(self, mode: int) -> dict[str, float]:
        with self.bench.installed(self.net, mode):
            slope = self._total(self._slope())
            up, down = self._loss(self.STEP), self._loss(-self.STEP)
            other = self._loss(0.0, seed=8)
        finite = (up - down) / (2 * self.STEP)
        same_mask = abs(other - (up + down) / 2) < 1e-3 * abs(other)
        return {
            "finite difference": abs(finite - slope) / abs(slope),
            "one mask for all": float("inf") if same_mask else 0.0,
        }

    def _moved(self, step: float) -> tuple[View, list[tuple[Tensor, Tensor]]]:
        """The shard moved along a direction, and each variable with that direction."""
        shard = self.bench.shard
        here, first = view(shard), int(shard.offsets[shard.part])
        pairs = []
        for k, name in enumerate(self.case.leaves):
            value = getattr(here, name)
            rows = first + torch.arange(len(value)) if name in ("x", "place") else shard.edge_data["edge_id"]
            along = weights(NODES + EDGES, value, 20 + k)[rows]
            leaf = (value + step * along).requires_grad_()
            setattr(here, name, leaf)
            pairs.append((leaf, along))
        return here, pairs

    def _loss(self, step: float, seed: int = 7) -> float:
        along = [
            weights(len(p), p, 30 + k) if p.dim() else p.detach() * 0 + 1 for k, p in enumerate(self.net.parameters())
        ]
        with torch.no_grad():
            for p, direction in zip(self.net.parameters(), along, strict=True):
                p += step * direction
        here, _ = self._moved(step)
        value = self._total(float(self._forward(here, seed).detach()))
        with torch.no_grad():
            for p, direction in zip(self.net.parameters(), along, strict=True):
                p -= step * direction
        return value

    def _forward(self, here: View, seed: int) -> Tensor:
        torch.manual_seed(100 * seed + self.bench.group.rank)
        return self.bench.loss(self.bench.shard, {"out": self.case.call(self.net, here)})

    def _slope(self) -> float:
        self.net.zero_grad()
        here, pairs = self._moved(0.0)
        self._forward(here, 7).backward()
        slope = sum(float((gradient_of(leaf) * along).sum()) for leaf, along in pairs)
        for k, p in enumerate(self.net.parameters()):
            along = weights(len(p), p, 30 + k) if p.dim() else torch.ones_like(p)
            slope += float((gradient_of(p) * along).sum())
        return slope

    def _total(self, value: float) -> float:
        return float(self.bench.group.all_reduce(torch.tensor([value], dtype=torch.float64)))


def traffic(bench: Bench, make: Any, call: Any, forward: int, backward: int, modes: list[int]) -> dict[str, Any]:
    """Bytes and messages of the second step beside one message per peer and direction with each halo row once."""
    result: dict[str, Any] = {}
    exchange, group = bench.exchange, bench.group
    outwards, back = [len(rows) for rows in exchange.send_rows], list(exchange.reads)
    for mode in modes:
        torch.manual_seed(1)
        net, here = make().double(), view(bench.shard)
        here.x.requires_grad_()
        with bench.installed(net, mode) as engine:
            engine.constants.add([here.index, here.weight])  # as a strategy does; normalised weights are then kept
            call(net, here).sum().backward()
            with Sends(group) as first:
                loss = call(net, here).sum()
            with Sends(group) as sent:
                loss.backward()
        if isinstance(net, pyg.GATConv) and mode == 1:
            sent = [8 * backward * rows for rows in back if rows]
        result[f"mode {mode}"] = {
            f"forward bytes {sum(first)}, not {sum(outwards) * 8 * forward}": abs(
                sum(first) - sum(outwards) * 8 * forward
            ),
            f"backward bytes {sum(sent)}, not {sum(back) * 8 * backward}": abs(sum(sent) - sum(back) * 8 * backward),
            "forward messages": abs(len(first) - sum(map(bool, outwards))),
            "backward messages": abs(len(sent) - sum(map(bool, back))),
        }
    return result


def far_from_zero(bench: Bench) -> dict[str, Any]:
    """Batch norm of float32 values around 1e4."""
    whole = torch.randn(NODES, 5, generator=torch.Generator().manual_seed(2)) * torch.arange(1, 6) + 1e4
    first, last = bench.shard.offsets[bench.shard.part : bench.shard.part + 2].tolist()
    norm, reference = nn.BatchNorm1d(5), nn.BatchNorm1d(5).double()
    net = nn.Sequential(norm)
    with bench.installed(net, 1):
        out = torch.cat(bench.group.all_gather(net(whole[first:last]).detach()))
    reference(whole.double())
    spread = float((out.double().std(0, unbiased=False) - 1).abs().max())
    return {
        "float32": {
            "std": spread,
            "running_mean": difference(norm.running_mean.double(), reference.running_mean),
            "running_var": difference(norm.running_var.double(), reference.running_var),
        }
    }
