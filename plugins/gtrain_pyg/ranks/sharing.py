"""Memory that the ranks of a machine share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from gtrain.graph.sampling.scratch import read_only
from gtrain.strategy.group import Group
from gtrain.wire import SharedTensors
from gtrain.wire.shared import SharedDirectory
from gtrain_pyg.ranks.hosting import Hosting

Array = NDArray[Any]
WAIT_SECONDS = 600.0
"""How long a rank waits for what another rank of its machine is making."""


class Sharing:
    """Arrays made by one rank of a machine and read by all of them.

    Args:
        rank: this rank.
        directory: name of the machine's directory; None: nothing is shared.
        owned: the directory, in the rank that made it.
    """

    def __init__(self, rank: int, directory: str | None = None, owned: SharedDirectory | None = None) -> None:
        self._rank, self._directory, self._owned = rank, directory, owned
        self._kept: list[SharedTensors] = []
        self._arrays: dict[str, dict[str, Array]] = {}

    @classmethod
    def meet(cls, group: Group, hosting: Hosting) -> Sharing:
        """Agree on a directory with the other ranks of the machine; every rank of the group calls it.

        Ranks that host nothing together share nothing: theirs are machines of their own.
        """
        alone = len(hosting.parts) < 2 or hosting.complete and hosting.world == 1
        first = hosting.machines[hosting.rank] == hosting.rank
        owned = SharedDirectory() if first and not alone else None
        names = group.all_gather_object(None if owned is None else owned.name)
        return cls(hosting.rank, names[hosting.machines[hosting.rank]], owned)

    def arrays(self, name: str, maker: int, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        """Arrays that rank ``maker`` makes and the other ranks of its machine read; read-only, and made once.

        Args:
            name: what they are called; letters, digits and dashes.
            maker: the rank that makes them; it has to ask for them as well. Where nothing is shared, each makes its
                own.
            make: called in that rank.

        Raises:
            DeadlineError: the other rank did not make them in time.
        """
        if name not in self._arrays:
            self._arrays[name] = self._made(name, maker, make)
        return self._arrays[name]

    def _made(self, name: str, maker: int, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        if self._directory is None:
            return {key: read_only(array) for key, array in make().items()}
        if maker == self._rank:
            made = {key: torch.from_numpy(array) for key, array in make().items()}
            shared = SharedTensors.create(self._directory, name, made)
        else:
            shared = SharedTensors.attach(self._directory, name, WAIT_SECONDS)
        self._kept.append(shared)
        return {key: read_only(tensor.numpy()) for key, tensor in shared.items()}

    def close(self) -> None:
        """Let go. Arrays stay valid where they are referred to; ranks that come later find nothing."""
        for shared in self._kept:
            shared.close()
        self._kept, self._arrays = [], {}
        if self._owned is not None:
            self._owned.close()
