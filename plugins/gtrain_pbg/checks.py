"""What the strategy refuses before anything is trained."""

from __future__ import annotations

from typing import Any

from gtrain.errors import ConfigError
from gtrain.graph.store import Store
from gtrain.nn.recipe import ModelRecipe
from gtrain.protocols import StoreData


def check_training(trainer: Any, data: StoreData | None, model: ModelRecipe) -> None:
    """Refuse batches that do not come out even, and a limit of an epoch that cannot be kept.

    Raises:
        ConfigError: with the setting.
    """
    if trainer is not None:
        _check_limit(trainer)
    size = None if data is None else data.batch_size
    recipe = next((group for group in model.groups if not group.all_negs), None)  # without chunks any size will do
    if size is not None and recipe is not None and size > recipe.places and size % recipe.places:
        key = "num_batch_negs" if recipe.num_batch_negs else "num_uniform_negs"
        raise ConfigError(
            f"data.batch_size={size} is no multiple of model.{key}={recipe.places}, the edges of a chunk: "
            f"{size} = {size // recipe.places} * {recipe.places} + {size % recipe.places}.",
            hint=f"set data.batch_size={size // recipe.places * recipe.places}.",
        )


def _check_limit(trainer: Any) -> None:
    limit = trainer.limit_train_batches
    if not isinstance(limit, int) and 0 < limit < 1:
        raise ConfigError(
            f"trainer.limit_train_batches={limit} was set; strategy=pbg makes the batches of an epoch as it trains, "
            "and cannot train a fraction of them.",
            hint="set a whole number of batches of about 50,000 edges.",
        )
    if isinstance(limit, int) and limit and trainer.num_nodes > 1:
        raise ConfigError(
            f"trainer.limit_train_batches={limit} was set with trainer.num_nodes={trainer.num_nodes}; strategy=pbg "
            "leases buckets to several machines, whose epoch ends when all buckets are trained.",
            hint="leave trainer.limit_train_batches out, or set trainer.num_nodes=1.",
        )


def check_store(store: Store, partitions: int) -> None:
    """Refuse a store that was made for something else.

    Raises:
        ConfigError: it has another number of parts, or no buckets.
    """
    if store.num_parts != partitions or not store.has_buckets:
        raise ConfigError(
            f"strategy.num_partitions={partitions} was set, and the store {store.path} has "
            f"{store.num_parts} parts{'' if store.has_buckets else ' and no edge buckets'}.",
            hint="let the gtrain command make the store, or set num_parts and buckets of the data module.",
        )
