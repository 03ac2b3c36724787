"""What the agent imports just before it forks, so that every rank starts with it loaded.

No tensor is made and no thread pool started here: a pool does not survive a fork. No module with compiled kernels
belongs here either: one that starts OpenMP when it is imported kills every forked child.
"""

import lightning.pytorch  # noqa: F401
import torch  # noqa: F401
import torch.distributed  # noqa: F401
import torch.optim  # noqa: F401
import torch_geometric.loader  # noqa: F401
import torch_geometric.nn  # noqa: F401
import torchmetrics.classification  # noqa: F401

import gtrain.task  # noqa: F401
from gtrain.kernel_cache import place as place_kernels  # noqa: F401


def share_compiler() -> None:
    """Have numba load its tables of types and functions, which it would do in each process that calls a kernel.

    It takes a fifth of a second, which a job of one process that calls none is spared.
    """
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
