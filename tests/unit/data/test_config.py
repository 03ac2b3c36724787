"""gtrain.data.config and conf/data: the schema, the YAML and the constructor say the same."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import REPO
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from omegaconf import MISSING, DictConfig, OmegaConf

from gtrain.config import VERSION_BASE
from gtrain.data.config import SCHEMAS, register

CONF = REPO / "conf"
PRESETS = (
    "split",
    "train_fraction",
    "val_fraction",
    "normalize_features",
    "unlabelled",
    "partitioner",
    "task",
    "joint_types",
    "batch_size",
)
"""Options that a subclass sets on the way to the base, so that its signature does not show them."""


@pytest.fixture
def composed() -> Iterator[Any]:
    """Return a function that composes a configuration with the group ``data`` alone."""
    register()
    root = {"defaults": ["_self_", {"data": "planted"}], "seed": 3, "paths": {"data": "raw", "stores": "made"}}
    ConfigStore.instance().store(name="only_data", node=root)
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF), **VERSION_BASE):
        yield lambda *overrides: compose("only_data", overrides=list(overrides)).data
    GlobalHydra.instance().clear()


def arguments(target: str) -> dict[str, Any]:
    """Return the keyword arguments of a source, with its defaults, through its base classes."""
    module, name = target.rsplit(".", 1)
    found: dict[str, Any] = {}
    for cls in reversed(getattr(importlib.import_module(module), name).__mro__):
        if cls.__module__.startswith("gtrain.") and "__init__" in vars(cls):
            own = inspect.signature(cls.__init__).parameters.values()
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own):
                found = {}  # takes nothing of its base's
            found |= {p.name: p.default for p in own if p.kind is p.KEYWORD_ONLY}
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_yaml_schema_and_constructor_agree(name: str, composed: Any) -> None:
    config: DictConfig = composed(f"data={name}")
    fields = {field.name: field for field in dataclasses.fields(SCHEMAS[name])}
    yaml = OmegaConf.to_container(OmegaConf.load(CONF / "data" / f"{name}.yaml"))
    assert isinstance(yaml, dict)
    assert set(yaml) - {"defaults"} == set(fields), "YAML and schema"
    accepted = arguments(config._target_)
    if name in ("planetoid", "amazon", "coauthor", "heterophilous", "entities"):
        accepted.pop("options")  # of the general class; a preset fixes them
    assert set(accepted) == set(fields) - {"_target_"}, "schema and constructor"
    assert OmegaConf.get_type(config) is SCHEMAS[name]
    for key in set(fields) - {"_target_", "root", "store", "seed", "path"}:
        assert yaml[key] == fields[key].default, key
        preset = key in PRESETS
        assert preset or accepted[key] == fields[key].default, key
    assert (config.seed, config.root, config.store) == (3, "raw", "made")


@pytest.mark.parametrize("name", SCHEMAS)
def test_presets_of_the_yaml_are_those_of_the_class(name: str, composed: Any) -> None:
    fields = dataclasses.fields(SCHEMAS[name])
    required = {field.name: "x" for field in fields if field.default == MISSING and field.name != "_target_"}
    if name == "edges":
        required["path"] = "x"  # or edge_sets
    config = composed(f"data={name}", *(f"data.{key}={value}" for key, value in required.items()))
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    module, _, cls = values.pop("_target_").rpartition(".")
    bare = getattr(importlib.import_module(module), cls)(**required, seed=values["seed"])
    made = getattr(importlib.import_module(module), cls)(**values)
    for key in ("split", "normalize_features", "unlabelled", "partitioner", "num_classes", "name"):
        assert getattr(bare, key) == getattr(made, key), key
    if OmegaConf.to_container(config)["task"].endswith("link}"):
        assert bare.task == made.task == "link"


@pytest.mark.parametrize(
    "override", ["data.num_nodes=many", "data.homophily=high", "data.replace=often", "data.num_node=5"]
)
def test_wrong_types_and_names_are_refused(override: str, composed: Any) -> None:
    with pytest.raises(ConfigCompositionException):
        composed(override)


def test_fan_outs_by_edge_type_can_be_typed(composed: Any) -> None:
    """Hydra takes no commas in a key unless they are escaped; PyG's double underscore needs nothing."""
    lists = composed("data.num_neighbors={a__to__b:[5,-1],default:[1,1]}").num_neighbors
    assert OmegaConf.to_container(lists) == {"a__to__b": [5, -1], "default": [1, 1]}
    assert composed(r"data.num_neighbors={a\,to\,b:[5]}").num_neighbors == {"a,to,b": [5]}


def test_options_of_a_dataset(composed: Any) -> None:
    assert composed("data=pyg", "data.options={name: Cora}").options == {"name": "Cora"}
    assert composed("data=pyg", "+data.options.name=Cora").options == {"name": "Cora"}


def test_it_is_light() -> None:
    code = "import sys, gtrain.data.config as c; c.register(); print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CONF.parent, check=True)
    assert done.stdout.split() == ["False", "False"]
