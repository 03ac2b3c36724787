"""TorchRec's row-wise sharding, for bench_ps.py: run by the interpreter of an environment that has TorchRec.

    python tests/benchmarks/peers/ps_torchrec.py --shape 512,52 --steps 40

Two ranks over gloo, one thread each: one table of 2^20 rows, cut by rows over the ranks (``row_wise``, which TorchRec's
sharder does not offer on CPUs unless it is told to), weighted sums of 72 rows an example, fused row-wise Adagrad, and
the same layer above as in ``model=sparse``, in plain data parallelism with Adam. Batches are made beforehand. Prints
examples/s of the fastest quarter of the steps, and CPU ms of both ranks a step.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from ps_peers import FEATURES, WORKERS, batches, begin
from torch import Tensor, multiprocessing, nn

TABLE = "wide"


def made(width: int, process_group: Any) -> nn.Module:
    """The model, cut over the ranks, with the optimizer of the table fused into its backward pass."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv

    class RowWise(EmbeddingBagCollectionSharder):
        """Offers what works on CPUs too."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["row_wise"]

        def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
            return [EmbeddingComputeKernel.FUSED.value]

    config = EmbeddingBagConfig(
        name=TABLE, embedding_dim=width, num_embeddings=FEATURES, feature_names=["ids"], pooling=PoolingType.SUM
    )
    sharders = [RowWise(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05})]
    model = _Model(EmbeddingBagCollection(tables=[config], is_weighted=True, device=torch.device("meta")), width)
    constraints = {TABLE: ParameterConstraints(sharding_types=["row_wise"])}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=WORKERS, compute_device="cpu", local_world_size=WORKERS), constraints=constraints
    )
    plan = planner.collective_plan(model, sharders, process_group)
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(process_group),
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,
    )


class _Model(nn.Module):
    """The wide layer and the one above."""

    def __init__(self, table: nn.Module, width: int) -> None:
        super().__init__()
        self.table = table
        self.bias = nn.Parameter(torch.zeros(width))
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(width, 2))

    def forward(self, rows: Any) -> Tensor:
        """Scores ``[m, 2]``."""
        scores: Tensor = self.rest(self.table(rows).values() + self.bias)
        return scores


def rank(number: int, rows: int, width: int, steps: int, where: str, results: Any) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), WORLD_SIZE=str(WORKERS), LOCAL_WORLD_SIZE=str(WORKERS))
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=number, world_size=WORKERS)
    from torchrec import KeyedJaggedTensor

    assert dist.group.WORLD is not None
    model = made(width, dist.group.WORLD)
    mine = [parameter for name, parameter in model.named_parameters() if TABLE not in name]
    optimizer = torch.optim.Adam(mine, lr=0.01)
    data = []
    for ids, offsets, values, labels in batches(number, rows):
        jagged = KeyedJaggedTensor(keys=["ids"], values=ids, weights=values, offsets=offsets)
        data.append((jagged, labels))
    times, cpu = [], 0.0
    for step in range(steps + 4):
        if step == 4:
            dist.barrier()
            cpu = time.process_time()
        before = time.perf_counter()
        jagged, labels = data[step % len(data)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(jagged), labels).backward()
        optimizer.step()
        times.append(time.perf_counter() - before)
    results.put((times[4:], time.process_time() - cpu))
    dist.destroy_process_group()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="512,52", help="rows of a rank in a step, columns")
    parser.add_argument("--steps", type=int, default=160)
    given = parser.parse_args()
    rows, width = (int(number) for number in given.shape.split(","))
    with tempfile.TemporaryDirectory() as folder:
        found = begin(rank, rows, width, given.steps, folder)
    quarter = given.steps // 4
    fastest = min(sum(found[0][0][at : at + quarter]) for at in range(0, given.steps - quarter + 1, quarter))
    cpu = sum(seconds for _, seconds in found)
    print(json.dumps({"examples": rows * WORKERS * quarter / fastest, "cpu": 1e3 * cpu / given.steps}))


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
