"""The modules that the agent imports before it forks, so that every rank starts with them loaded.

Nothing here may create a tensor or start a thread pool, because a pool does not survive a fork. Modules with compiled
kernels must not be imported either: importing one may start OpenMP, which kills forked children.
"""

import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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


def keep_templates_in_memory() -> None:
    """Have PyG compile the code that it generates for each convolution without a file; called in ranks.

    PyG writes a file per class and process below the temporary folder and leaves it there.
    """
    import torch_geometric.nn.conv.message_passing as message_passing
    import torch_geometric.nn.sequential as sequential

    for module in (message_passing, sequential):
        if hasattr(module, "module_from_template"):
            module.module_from_template = _module_from_template


def _module_from_template(module_name: str, template_path: str, tmp_dirname: str, **kwargs: Any) -> ModuleType:
    """Replace ``torch_geometric.template.module_from_template``; ``inspect`` and TorchScript find the source."""
    from jinja2 import Environment, FileSystemLoader

    if module_name in sys.modules:
        return sys.modules[module_name]
    path = Path(template_path)
    text = Environment(loader=FileSystemLoader(path.parent)).get_template(path.name).render(**kwargs)
    name = f"<{module_name}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = ModuleType(module_name)
    module.__file__ = name
    sys.modules[module_name] = module
    exec(compile(text, name, "exec"), vars(module))
    return module


def share_compiler() -> None:
    """Load numba's tables of types and functions once instead of in each process that calls a kernel.

    This takes 0.2 s, so jobs of one process skip it.
    """
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
