"""gtrain.moved: old module paths give the modules that have moved, with a warning that names the new path."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from gtrain import backends, protocols
from gtrain.moved import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_every_new_path_exists_and_no_old_one_has_a_file(old: str) -> None:
    assert importlib.util.find_spec(MOVED[old]) is not None
    spec = importlib.util.find_spec(old)
    assert spec is not None and spec.origin is None


def test_an_old_path_gives_the_same_objects_and_warns() -> None:
    from gtrain.data.sources.kg import KGData

    sys.modules.pop("gtrain.data.kg", None)
    with pytest.warns(FutureWarning, match=r"gtrain\.data\.kg has moved to gtrain\.data\.sources\.kg"):
        old = importlib.import_module("gtrain.data.kg")
    assert old.KGData is KGData and "KGData" in dir(old)


def test_an_old_folder_can_be_imported_from() -> None:
    from gtrain.data.ingest.edge_list import read_edge_list

    with pytest.warns(FutureWarning, match="ingest.edge_list has moved"):
        sys.modules.pop("gtrain.graph.ingest.edge_list", None)
        from gtrain.graph.ingest.edge_list import read_edge_list as old
    assert old is read_edge_list


def test_a_renamed_name_gives_the_same_object_and_warns() -> None:
    with pytest.warns(FutureWarning, match="backends.Installed is now gtrain.backends.InstalledBackends"):
        assert backends.Installed is backends.InstalledBackends
    with pytest.warns(FutureWarning, match="protocols.entry is now gtrain.protocols.batch_entry"):
        assert protocols.entry is protocols.batch_entry
    with pytest.raises(AttributeError, match="has no attribute 'Uninstalled'"):
        _ = backends.Uninstalled


def test_a_name_that_never_was_is_still_missing() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("gtrain.data.nothing")
