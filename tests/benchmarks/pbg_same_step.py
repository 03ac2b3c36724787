"""Whether a training step of ``strategy=pbg`` is that of PyTorch-BigGraph: the same edges, negatives and first vectors.

    python tests/benchmarks/pbg_same_step.py

It runs in an environment that has both (``pip install torchbiggraph==1.0.0 "setuptools<81"`` beside gtrain), and prints
after each batch by how much tables and operators differ. The loss is the sum over a batch's edges there, their mean
here. Adagrad does not see a constant factor but for ``eps``, so ``eps / batch_size`` makes full batches equal. The
last batch here is shorter: ``strategy=pbg`` itself cuts batches of equal size.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torchbiggraph.model as theirs
from torch import Tensor
from torchbiggraph.config import EntitySchema, RelationSchema
from torchbiggraph.edgelist import EdgeList
from torchbiggraph.entitylist import EntityList
from torchbiggraph.row_adagrad import RowAdagrad
from torchbiggraph.train import Trainer
from torchbiggraph.types import Partition, Side

from gtrain.model.kg.embedding import KGEmbedding
from gtrain_pbg.step.layout import EdgeBatch, PartitionRows
from gtrain_pbg.step.relations import RelationWeights, UpdateRule
from gtrain_pbg.step.training import TrainingStep

NODES, RELATIONS, COLUMNS, CHUNK, UNIFORM, LR, EPS = 500, 5, 20, 50, 50, 0.1, 1e-10


class Theirs:
    """PyTorch-BigGraph's model and trainer, whose drawn negatives are given."""

    def __init__(self, table: Tensor) -> None:
        schema = RelationSchema(name="all", lhs="all", rhs="all", operator="complex_diagonal")
        operators = [
            [theirs.instantiate_operator("complex_diagonal", side, RELATIONS, COLUMNS)] for side in (Side.LHS, Side.RHS)
        ]
        entities, comparator = {"all": EntitySchema(num_partitions=1)}, theirs.DotComparator()
        settings = (COLUMNS, [schema], entities, CHUNK, UNIFORM, False, False, *operators, comparator)
        self.model = theirs.MultiRelationEmbedder(*settings, num_dynamic_rels=RELATIONS)
        self.table = torch.nn.Parameter(table.clone())
        self._trainer = Trainer(torch.optim.Adagrad(list(self.model.parameters()), lr=LR), "softmax", 0.1, [schema])
        for side in (Side.LHS, Side.RHS):
            self.model.set_embeddings("all", self.table, side)
        self._trainer.entity_optimizers[("all", Partition(0))] = RowAdagrad([self.table], lr=LR)

    def train(self, edges: Tensor, drawn: tuple[Tensor, Tensor]) -> None:
        """Train on edges ``[B, 3]`` of heads, relations and tails."""
        given = iter(drawn)  # of heads, then of tails

        def sample(embedding: Any, *shape: int) -> Tensor:
            rows: Tensor = embedding.get(next(given).view(*shape))
            return rows

        theirs.SimpleEmbedding.sample_entities = sample
        ends = (EntityList.from_tensor(edges[:, column]) for column in (0, 2))
        self._trainer.process_one_batch(self.model, EdgeList(*ends, edges[:, 1]))

    @property
    def operators(self) -> dict[str, Tensor]:
        """Parameters by the names that gtrain has for them."""
        forwards, backwards = self.model.lhs_operators[0], self.model.rhs_operators[0]
        named = {"forwards.real": forwards.real, "forwards.imaginary": forwards.imag}
        return named | {"backwards.real": backwards.real, "backwards.imaginary": backwards.imag}


class Ours:
    """The training step of ``strategy=pbg``."""

    def __init__(self, table: Tensor, eps: float) -> None:
        model = KGEmbedding(NODES, RELATIONS, dimension=COLUMNS, num_batch_negs=CHUNK, num_uniform_negs=UNIFORM)
        recipe, self.table = model.recipe().groups[0], table.clone()
        self._rows = PartitionRows(self.table, table.new_zeros(NODES, 1), torch.full((NODES,), -1, dtype=torch.int32))
        self.weights = {
            name: RelationWeights(parameter.detach().clone(), torch.zeros(len(parameter), parameter[0].numel()))
            for name, parameter in recipe.parameters.items()
        }
        self._step = TrainingStep(recipe, self.weights, torch.float32, "float32")
        self._rules = UpdateRule("rowwise_adagrad", LR, eps), UpdateRule("adagrad", LR, eps)

    def train(self, edges: Tensor, drawn: tuple[Tensor, Tensor]) -> None:
        """Train on the same."""
        heads, relation, tails = (column.contiguous() for column in edges.T)
        self._step(EdgeBatch(heads, relation, tails, None, drawn), self._rows, self._rows, *self._rules)


def main() -> None:
    """Train side by side: full batches, and one that is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--edges", type=int, default=1620)
    options = parser.parse_args()
    torch.manual_seed(0)
    table = 0.001 * torch.randn(NODES, COLUMNS)
    ends = torch.randint(NODES, (2, options.edges))
    edges = torch.stack([ends[0], torch.randint(RELATIONS, (options.edges,)), ends[1]], 1)
    peer = Theirs(table)
    ours = {"eps": Ours(table, EPS), "eps / batch_size": Ours(table, EPS / options.batch)}
    print("edges  gtrain's eps      tables differ  operators differ (relative, in the 2-norm)")
    for some in edges.split(options.batch):
        count = -(-len(some) // CHUNK) * UNIFORM
        drawn = torch.randint(NODES, (count,)), torch.randint(NODES, (count,))
        peer.train(some, drawn)
        for name, mine in ours.items():
            mine.train(some, drawn)
            tables = relative(mine.table, peer.table)
            operators = max(relative(mine.weights[key].value, value) for key, value in peer.operators.items())
            print(f"{len(some):5}  {name:16} {tables:14.1e} {operators:17.1e}", flush=True)


def relative(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, relative to what is wanted."""
    return float((found - wanted.detach()).norm() / wanted.detach().norm())


if __name__ == "__main__":
    main()
