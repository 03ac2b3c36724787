"""The number format of matrix products, and which one ``strategy.matmul=auto`` resolves to.

The choice depends on the instructions of the CPU and on the model alone, so it is the same in every run. It is not
timed: another process on the same core would change the outcome.
"""

from __future__ import annotations

import torch
from llvmlite import binding

from gtrain.nn.recipe import EdgeRecipe, ModelRecipe
from gtrain_pbg.kernels.tiles import has_words

FORMATS = ("float32", "bfloat16", "int8")
"""From the most exact to the fastest."""
LEAST_COLUMNS = 32
"""Below this dimension, exponentials and row updates take longer than the products that a low format speeds up."""


def fastest_format() -> str:
    """Return the fastest format that this CPU has instructions for.

    ``bfloat16`` needs AVX512-BF16, without which torch converts to float32 and back. ``int8`` needs AVX512-VNNI or AMX
    too: chunks that fit into the caches, and rows, are in bfloat16.
    """
    if not has_words():
        return "float32"
    features = binding.get_host_cpu_features()
    return "int8" if features.get("avx512vnni") or features.get("amx-int8") else "bfloat16"


def lowest_format(recipe: ModelRecipe, dtype: torch.dtype) -> str:
    """Return the format of fewest bits that trains this model as accurately as float32, as far as that was measured.

    Args:
        recipe: of the model.
        dtype: of tables and parameters.
    """
    if dtype != torch.float32:
        # Products of float64 are in float64, whatever was set.
        return "float32"
    return min((_lowest_of_group(group) for group in recipe.groups), key=FORMATS.index)


def _lowest_of_group(recipe: EdgeRecipe) -> str:
    # Distances are differences of large products, which cancel; other losses and cos were not measured.
    measured = recipe.comparator == "dot" and recipe.loss == "softmax"
    if not measured or recipe.dimension < LEAST_COLUMNS:
        return "float32"
    return "int8" if recipe.num_batch_negs and not recipe.all_negs and not (recipe.n3 or recipe.dura) else "bfloat16"


def choose_format(recipe: ModelRecipe, dtype: torch.dtype, cpus: list[str]) -> str:
    """Return the format that ``auto`` resolves to.

    Args:
        recipe: of the model.
        dtype: of tables and parameters.
        cpus: :func:`fastest_format` of each rank; all take the format of the slowest CPU.
    """
    return min((lowest_format(recipe, dtype), *cpus), key=FORMATS.index)


def device_format(recipe: ModelRecipe, dtype: torch.dtype) -> str:
    """Return the format that ``auto`` resolves to on a GPU, which multiplies bfloat16 several times as fast.

    Args:
        recipe: of the model.
        dtype: of tables and parameters.
    """
    return without_int8(lowest_format(recipe, dtype))


def without_int8(matmul: str) -> str:
    """Return the format of a GPU for one of a CPU."""
    return "bfloat16" if matmul == "int8" else matmul
