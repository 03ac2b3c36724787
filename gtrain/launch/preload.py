"""The modules that the agent imports before it forks, so that every rank starts with them loaded.

Nothing here may create a tensor or start a thread pool, because a pool does not survive a fork. Modules with compiled
kernels must not be imported either: importing one may start OpenMP, which kills forked children.
"""

import importlib.util

import lightning.pytorch  # noqa: F401
import torch  # noqa: F401
import torch.distributed  # noqa: F401
import torch.optim  # noqa: F401
import torch_geometric.loader  # noqa: F401
import torch_geometric.nn  # noqa: F401
import torchmetrics.classification  # noqa: F401

import gtrain.run.task  # noqa: F401
from gtrain.kernel_cache import cache_folder as place_kernels  # noqa: F401

for _client in ("s3fs", "gcsfs", "adlfs"):
    # Lightning imports those that are installed in every rank that checkpoints: here the ranks share their memory.
    if importlib.util.find_spec(_client) is not None:
        importlib.import_module(_client)


def share_compiler() -> None:
    """Load numba's tables of types and functions once instead of in each process that calls a kernel.

    This takes 0.2 s, so jobs of one process skip it.
    """
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
