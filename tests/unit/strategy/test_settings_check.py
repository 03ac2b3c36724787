"""gtrain.launch.settings_check: what ranks of a job compare when they meet, and what a refusal says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import LIMIT, until
from lightning.fabric.plugins.environments import LightningEnvironment
from omegaconf import OmegaConf

from gtrain import __version__
from gtrain.errors import ConfigError
from gtrain.launch import job_store, settings_check, slot
from gtrain.launch.key_value import KeyValueServer, KeyValueStore
from gtrain.launch.settings_check import check_refused, check_release, check_same, comparable
from gtrain.launch.sockets import listen_here

SETTINGS = {"gtrain": __version__, "seed": "0", "data.path": "/", "model.lr": "0.1"}


@pytest.fixture
def job() -> Iterator[KeyValueStore]:
    listener = listen_here()
    server = KeyValueServer([listener.socket], None, None)
    yield KeyValueStore(listener.address, None, 10.0)
    server.close()
    listener.close()


def refusal(job: KeyValueStore, settings: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_same(job, 3, "rank 3", settings)
    with pytest.raises(ConfigError) as told:
        check_refused(job, 1)
    assert told.value.message == caught.value.message and "\n" not in told.value.message
    return told.value.message


def test_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LR", "0.5")
    cfg = OmegaConf.create(
        {
            "seed": 1,
            "verb": None,
            "cluster": {"rank": 1},
            "paths": {"run": "runs"},
            "data": {"root": "raw", "store": "stores", "path": "/mnt/edges.txt", "seed": "${seed}", "fan_out": [3, 2]},
            "model": {"lr": "${oc.env:LR}", "act": "relu"},
        }
    )
    assert comparable(cfg) == {
        **{"gtrain": __version__, "seed": "1", "verb": "null", "data.path": "/", "data.fan_out": "[3, 2]"},
        **{"model.lr": "0.5", "model.act": "relu"},
    }


def test_equal_settings_and_other_paths_pass(job: KeyValueStore) -> None:
    check_same(job, 0, "rank 0", SETTINGS)
    check_same(job, 1, "rank 1", {**SETTINGS, "data.path": "edges.txt"})
    check_refused(job, 1)
    check_release(job, "parameter 0")


def test_a_rank_compares_with_rank_0_of_its_own_job_of_a_sweep(
    job: KeyValueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another launcher the ranks and the store live as long as the sweep."""
    monkeypatch.setattr(job_store, "_store", job)
    monkeypatch.setattr(slot, "_job_number", 0)
    known = []
    for lr in ("0.1", "0.2"):
        slot.count_job()
        mine = job_store.job_store(LightningEnvironment())
        known.append(mine.prefixed("gtrain-settings").check(["rank 0"]))
        for rank in (0, 1):
            check_same(mine, rank, f"rank {rank}", {**SETTINGS, "model.lr": lr})
    assert known == [False, False]


def test_a_refusal_names_the_key_and_both_values(job: KeyValueStore) -> None:
    check_same(job, 0, "rank 0", SETTINGS)
    assert refusal(job, {**SETTINGS, "model.lr": "0.2"}) == "rank 3 has model.lr=0.2, and rank 0 has model.lr=0.1."
    other = {"gtrain": __version__, "data.path": "/", "model.lr": "0.2", "model.bias": "true", "model.act": "elu"}
    assert refusal(job, other) == (
        "rank 3 has seed=(absent), model.lr=0.2, model.bias=true and 1 more, "
        "and rank 0 has seed=0, model.lr=0.1, model.bias=(absent) and 1 more."
    )


def test_of_another_release_only_that_is_named(job: KeyValueStore) -> None:
    check_same(job, 0, "rank 0", {**SETTINGS, "gtrain": "9.9"})
    said = refusal(job, {**SETTINGS, "model.lr": "0.2"})
    assert said == f"rank 3 has gtrain={__version__}, and rank 0 has gtrain=9.9."
    with pytest.raises(ConfigError, match="parameter 0 has gtrain=.*, and rank 0 has gtrain=9.9."):
        check_release(job, "parameter 0")


def test_rank_0_which_serves_the_store_ends_after_the_others_have_read_a_refusal(
    job: KeyValueStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 3 is refused; rank 2 has not been started, and is not waited for."""
    monkeypatch.setattr(settings_check, "READ_SECONDS", LIMIT)
    for rank in (0, 1):
        check_same(job, rank, f"rank {rank}", SETTINGS)
    with pytest.raises(ConfigError):
        check_same(job, 3, "rank 3", {**SETTINGS, "seed": "1"})
    ended = []

    def read(rank: int) -> None:
        with pytest.raises(ConfigError, match="rank 3 has seed=1, and rank 0 has seed=0."):
            check_refused(KeyValueStore(job.address, None, LIMIT), rank)
        ended.append(rank)

    first = threading.Thread(target=read, args=(0,))
    first.start()
    counts = job.prefixed("gtrain-settings")
    until(lambda: counts.add(settings_check._READ, 0) == 2, tmp_path)
    read(1)
    first.join()
    assert ended == [1, 0]


def test_rank_0_does_not_wait_forever_for_a_rank_that_does_not_read_a_refusal(
    job: KeyValueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_check, "READ_SECONDS", 0.1)
    for rank in (0, 1):
        check_same(job, rank, f"rank {rank}", SETTINGS)
    with pytest.raises(ConfigError):
        check_same(job, 3, "rank 3", {**SETTINGS, "seed": "1"})
    with pytest.raises(ConfigError, match="rank 3 has seed=1"):
        check_refused(job, 0)
