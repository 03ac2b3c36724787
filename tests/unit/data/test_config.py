"""gtrain.data.config: what it declares is what the command composes and what sources take."""

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
from gtrain.data.config import SCHEMAS, PlantedConfig, register
from gtrain.data.module import GraphDataModule
from gtrain.data.planted import PlantedData
from gtrain.data.sources.edges import EdgesData
from gtrain.data.sources.kg import KGData
from gtrain.errors import ConfigError

CONF = REPO / "conf"


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


def source(name: str) -> type[Any]:
    """Return the class of a source."""
    module, _, cls = SCHEMAS[name]._target_.rpartition(".")
    found: type[Any] = getattr(importlib.import_module(module), cls)
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_source_takes_its_settings(name: str, composed: Any) -> None:
    fields = {field.name: field for field in dataclasses.fields(SCHEMAS[name]) if field.name != "_target_"}
    shown = inspect.signature(source(name)).parameters
    assert {key: parameter.default for key, parameter in shown.items()} == {
        key: parameter.empty if field.default == MISSING else field.default
        for (key, field), parameter in zip(fields.items(), shown.values(), strict=True)
    }
    assert [key for key, field in fields.items() if not field.metadata["help"]] == []
    config: DictConfig = composed(f"data={name}")
    assert OmegaConf.get_type(config) is SCHEMAS[name]
    assert (config.seed, config.root, config.store) == (3, "raw", "made")


@pytest.mark.parametrize("name", SCHEMAS)
def test_defaults_of_python_and_of_the_command_are_the_same(name: str, composed: Any) -> None:
    fields = dataclasses.fields(SCHEMAS[name])
    missing = [field for field in fields if field.default == MISSING and field.name != "_target_"]
    required: dict[str, object] = {field.name: 5.0 if field.type == "float" else "x" for field in missing}
    if name == "edges":
        required["path"] = "x"  # or edge_sets
    config = composed(f"data={name}", *(f"data.{key}={value}" for key, value in required.items()))
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    del values["_target_"]
    bare = source(name)(**required, seed=3, root="raw", store="made").settings
    made = source(name)(**values).settings
    if name == "ogb":
        assert values["task"] == "node"
    differ = {key: (value, getattr(made, key)) for key, value in vars(bare).items() if value != getattr(made, key)}
    assert differ == {}


def test_keywords_replace_those_of_an_object() -> None:
    data = PlantedData(PlantedConfig(num_nodes=60, num_edges=300), seed=4, num_classes=3)
    assert (data.model.num_nodes, data.seed, data.num_classes, data.settings.num_edges) == (60, 4, 3, 300)


def test_a_source_with_a_constructor_of_its_own_works_as_before() -> None:
    class Mine(EdgesData):
        def __init__(self, folder: str, **common: Any) -> None:
            super().__init__(path=f"{folder}/edges.txt", undirected=True, **common)

    class Bare(GraphDataModule):
        def __init__(self, size: int = 3, **common: Any) -> None:
            super().__init__(task="link", **common)
            self.size = size

    assert (Mine("there", num_parts=2).path, Mine("there", num_parts=2).num_parts) == ("there/edges.txt", 2)
    assert (Bare(7, seed=5).size, Bare(7, seed=5).seed, Bare().settings.task) == (7, 5, "link")
    assert list(inspect.signature(Mine).parameters) == ["folder", "common"]


def test_unknown_and_missing_keywords_are_answered() -> None:
    with pytest.raises(ConfigError, match=r"(?s)PlantedData\(num_node=5\).*did you mean num_nodes"):
        PlantedData(num_node=5)
    with pytest.raises(ConfigError, match=r"KGData\(\) was called without path"):
        KGData()


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
