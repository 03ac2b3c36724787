"""As sar_conv_program.py, with the shards' tensors on a pretended device: an operation that mixes devices fails.

With ``--links`` tensors stay on the CPU, and are sent as between GPUs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sar_conv_bench
import sar_conv_program
from devices import links as linked
from devices.pretended import DEVICE, Pretended, Pretending
from torch import Tensor, nn


class Bench(sar_conv_bench.Bench):
    """Runs what an engine serves on the device."""

    def passes(self, case: Any, net: nn.Module, shard: Any, engine: Any = None) -> dict[str, Tensor]:
        if engine is None:
            return super().passes(case, net, shard)
        with Pretending(), self._moved(net):
            found = super().passes(case, net, shard, engine)
        return {name: tensor.inner if isinstance(tensor, Pretended) else tensor for name, tensor in found.items()}

    def loss(self, shard: Any, result: dict[str, Tensor]) -> Tensor:
        return super().loss(shard, {name: tensor.to("cpu") for name, tensor in result.items()})

    @contextmanager
    def _moved(self, net: nn.Module) -> Iterator[None]:
        """The exchange, what convolutions are given, and copies of parameters and buffers on the device."""
        view, rows = sar_conv_bench.view, self.exchange.send_rows
        homes = [(home, dict(home)) for m in net.modules() for home in (m._parameters, m._buffers)]
        sar_conv_bench.view = lambda shard: _on_device(view(shard))
        self.exchange.to(DEVICE)
        for home, tensors in homes:
            for name, tensor in tensors.items():
                if tensor is not None:
                    copy = Pretended(tensor.detach().clone())
                    home[name] = nn.Parameter(copy) if isinstance(tensor, nn.Parameter) else copy  # type: ignore[index]
        try:
            yield
        finally:
            sar_conv_bench.view, self.exchange.send_rows = view, rows
            for home, tensors in homes:
                home.update(tensors)  # type: ignore[arg-type]


def _on_device(view: Any) -> Any:
    tensors = {f.name: getattr(view, f.name) for f in dataclasses.fields(view)}
    moved = {name: Pretended(t.contiguous()) for name, t in tensors.items() if isinstance(t, Tensor)}
    return dataclasses.replace(view, **moved)


if __name__ == "__main__":
    links = "--links" in sys.argv
    sar_conv_program.Bench = linked.Bench if links else Bench  # type: ignore[misc]
    sys.argv = [argument for argument in sys.argv if argument != "--links"]
    sys.exit(sar_conv_program.main())
