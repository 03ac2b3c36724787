"""The code that PyG generates for each class of convolutions, compiled in memory.

PyG writes a file per class and process into the temporary folder and leaves it there.
"""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def keep_templates_in_memory() -> None:
    """Have PyG compile this code without a file, in this process."""
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
