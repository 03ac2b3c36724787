"""Convolutions as users write them, each with one habit that an engine could trip over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax


class Scaled(MessagePassing):
    """Multiplies messages by a parameter that starts at 1, as a plain sum would."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_j: Tensor, weight: Tensor | None) -> Tensor:
        scaled = self.scale * x_j
        return scaled if weight is None else weight.view(-1, 1) * scaled


class Clamped(MessagePassing):
    """Linear in small rows only."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x * 10)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.clamp(-8, 8)


class Detached(MessagePassing):
    """Sums rows without a gradient."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.detach()


class Reversed(MessagePassing):
    """Half the gradient, by a trick that numbers do not show."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j / 2 + (x_j / 2).detach()


class Dropped(MessagePassing):
    """Drops entries of messages."""

    def __init__(self, p: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.p = p

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return F.dropout(x_j, self.p, self.training)


class Given(MessagePassing):
    """A number among the arguments, another one at the second call."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        once = self.propagate(edge_index, x=x, scale=1.0)
        return once + self.propagate(edge_index, x=x, scale=2.5)

    def message(self, x_j: Tensor, scale: float) -> Tensor:
        return x_j * scale


class Remembering(MessagePassing):
    """Reads in ``message`` what ``forward`` left in the object."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.gate = self.lin(x).mean(0, keepdim=True).detach() * 0 + self.lin.weight.sum(0, keepdim=True)
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return (x_j * self.gate).tanh()


class Outside(MessagePassing):
    """Calls a function that has parameters which are not the convolution's."""

    def __init__(self, function: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.function(x_j - x_i).tanh()


class Annealed(MessagePassing):
    """A buffer that changes between the steps, from a value that shows nothing."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.factor


class Updating(MessagePassing):
    """Looks at its input again in ``update``."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, factor=x[:, :1])

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.sin()

    def update(self, aggregated: Tensor, factor: Tensor) -> Tensor:
        return aggregated * factor


class TwoHeads(MessagePassing):
    """A softmax of its own, and messages of three dimensions."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(node_dim=0, **kwargs)
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        h = self.lin(x).view(-1, 2, 3)
        return self.propagate(edge_index, h=h, q=x.view(-1, 2, 3), weight=weight).flatten(1)

    def message(self, h_j: Tensor, q_i: Tensor, weight: Tensor, index: Tensor, size_i: int) -> Tensor:
        alpha = softmax((h_j * q_i).sum(-1) * weight.view(-1, 1), index, num_nodes=size_i)
        return h_j * alpha.unsqueeze(-1)


class TwoSoftmaxes(MessagePassing):
    """One softmax over what another one made."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, index: Tensor, ptr: Tensor | None, size_i: int) -> Tensor:
        first = softmax(x_j[:, :1], index, ptr, size_i)
        second = softmax(first * x_j[:, 1:2], index, ptr, size_i)
        return x_j * (first + second)


class SoftmaxSquared(MessagePassing):
    """Messages that are not proportional to the coefficients of attention."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, x_i: Tensor, index: Tensor, ptr: Tensor | None, size_i: int) -> Tensor:
        alpha = softmax((x_j * x_i).sum(-1, keepdim=True), index, ptr, size_i)
        return x_j * alpha**2 + x_j.sin()


class SoftmaxOfScaledSource(MessagePassing):
    """Attention with a parameter inside ``message`` that starts at 0."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.temperature = nn.Parameter(torch.zeros(()))
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, x_i: Tensor, index: Tensor, ptr: Tensor | None, size_i: int) -> Tensor:
        alpha = softmax((x_j * x_i).sum(-1, keepdim=True) * self.temperature, index, ptr, size_i)
        return (x_j + self.shift) * alpha + self.shift


class Aggregating(MessagePassing):
    """An ``aggregate`` of its own."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.exp()

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
        total = inputs.new_zeros(dim_size, inputs.size(1)).index_add(0, index, inputs)
        return (total + 1).log()


class OfEdges(MessagePassing):
    """Reads nothing at the nodes."""

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        return torch.cat([x, self.propagate(edge_index, size=(len(x), len(x)), attr=attr)], 1)

    def message(self, attr: Tensor) -> Tensor:
        return attr.sin()


class OfTargets(MessagePassing):
    """Reads nothing at sources, and has a parameter in ``message``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = nn.Parameter(torch.full((6,), 0.7))

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, attr=attr)

    def message(self, x_i: Tensor, attr: Tensor) -> Tensor:
        return x_i * self.scale * attr[:, :1]


class OfNothing(MessagePassing):
    """Counts edges."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x * self.propagate(edge_index, size=(len(x), len(x)))

    def message(self, index: Tensor) -> Tensor:
        return torch.ones(len(index), 1, dtype=torch.float64)


class Counting(MessagePassing):
    """Uses the number of in-edges of a target in ``message``."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        degree = torch.bincount(index, minlength=size_i)
        return x_j / degree[index].view(-1, 1).to(x_j.dtype).sqrt()
