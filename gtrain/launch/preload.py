"""What the agent imports just before it forks, so that every rank starts with it loaded.

No tensor is made and no thread pool started here: a pool does not survive a fork. No module with compiled kernels
belongs here either: one that starts OpenMP when it is imported kills every forked child.
"""

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
from gtrain.kernel_cache import place as place_kernels  # noqa: F401


def keep_templates_in_memory() -> None:
    """Have PyG make the code that it writes for each convolution without a file; called in ranks.

    It writes a file below the temporary folder for each class and process, and leaves all of them there.
    """
    import torch_geometric.nn.conv.message_passing as message_passing
    import torch_geometric.nn.sequential as sequential

    for module in (message_passing, sequential):
        if hasattr(module, "module_from_template"):
            module.module_from_template = _module_from_template


def _module_from_template(module_name: str, template_path: str, tmp_dirname: str, **kwargs: Any) -> ModuleType:
    """As ``torch_geometric.template.module_from_template``; sources are found by ``inspect`` and TorchScript."""
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
    """Have numba load its tables of types and functions, which it would do in each process that calls a kernel.

    It takes a fifth of a second, which a job of one process that calls none is spared.
    """
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
