"""gtrain.reporting.graph: what a report reads from the store."""

from __future__ import annotations

from pathlib import Path

import test_musae as musae

from gtrain.data.sources.musae import MusaeData
from gtrain.reporting import graph


def test_classes_have_the_labels_of_the_data(tmp_path: Path) -> None:
    module = MusaeData(name="DE", path=musae.write(tmp_path / "DE"), store=str(tmp_path / "stores"))
    module.prepare_data()
    store = module.open_store()
    assert graph.class_labels(store) == [str(value) for value in store.facts["label_values"]]
    assert graph.class_labels(None) is None
