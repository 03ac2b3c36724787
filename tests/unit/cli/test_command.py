"""What the command does with its configuration: mistakes of processes by hand, and where processes are put."""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import LIMIT, REPO
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from gtrain import backends, config
from gtrain.backends import RolePlan
from gtrain.cli import entry
from gtrain.errors import ConfigError
from gtrain.launch import joining, launchers, rendezvous
from gtrain.launch.job import server_slots, worker_slots
from gtrain.launch.key_value import KeyValueServer, KeyValueStore
from gtrain.launch.launchers.base import RankInfo
from gtrain.launch.slot import Slot
from gtrain.launch.sockets import listen_here, listen_tcp
from gtrain.settings import as_typed

COUNTING = REPO / "tests" / "assets" / "counting"


@pytest.fixture
def counting() -> Iterator[None]:
    """The strategy of tests/assets/counting, found as an installed one is."""
    sys.path.insert(0, str(COUNTING))
    backends.installed.cache_clear()
    Plugins.instance().register(entry.BackendConfigs)
    config.register()
    launchers.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("gtrain.conf", **config.VERSION_BASE):
        yield
    sys.path.remove(str(COUNTING))
    backends.installed.cache_clear()


def composed(*overrides: str) -> DictConfig:
    """A configuration as the command composes it."""
    return compose("config", overrides=["paths.run=here", *overrides])


def mistake(*overrides: str) -> str:
    """What a command is answered."""
    names = ("strategy", "data", "model")
    with pytest.raises(ConfigError) as caught:
        entry.launch(composed(*overrides), dict.fromkeys(names, "counting"), list(overrides))
    assert caught.value.hint
    return str(caught.value)


MANUAL = ("cluster=manual", "strategy=counting", "trainer.num_nodes=2")
SERVE = ("verb=serve", "strategy=counting")
TCP = "cluster.rendezvous=tcp://127.0.0.1:29500"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ((*SERVE, TCP), ["role is not set", "the servers of strategy=counting are counter"]),
        ((*SERVE, TCP, "role=lock"), ["role=lock was set; the servers of strategy=counting are counter."]),
        (("verb=serve", "strategy=sar", TCP, "role=lock"), ["strategy=sar has no servers", "with servers: counting"]),
        ((*SERVE, "role=counter"), ["cluster.rendezvous is not set", "tcp://host:port or file:///path"]),
        ((*SERVE, "role=counter", TCP, "cluster.rank=1"), ["cluster.rank=1 was set", "has 1 servers", "0 to 0"]),
        ((*SERVE, "role=counter", TCP, "cluster.timeout_seconds=0.2"), ["nothing answered there within 0.2 s"]),
        ((*SERVE, "role=counter", "cluster.rendezvous=tcp://elsewhere:29500"), ["reached by other machines", "key"]),
        ((*MANUAL, "cluster.rank=0"), ["cluster.rendezvous is not set"]),
        ((*MANUAL, TCP), ["cluster.rank is not", "cluster.rank=0 on one, up to 1"]),
        ((*MANUAL, TCP, "cluster.rank=2"), ["cluster.rank=2 was set", "the ranks 0 to 1"]),
        ((*MANUAL, TCP, "cluster.rank=-1"), ["cluster.rank=-1 was set; it must be 0 or more"]),
        (
            (*MANUAL, TCP, "cluster.rank=0", "cluster.key_file=none.key"),
            ["the file does not exist", "gtrain key"],
        ),
        ((*MANUAL, TCP, "cluster.rank=1", "cluster.timeout_seconds=0.2"), ["nothing answered", "cluster.rank=0 too"]),
        ((*MANUAL, "cluster.rank=0", "cluster.rendezvous=tcp://elsewhere:9"), ["cluster.key_file is not set"]),
        ((*MANUAL, TCP, "cluster.rank=0", "cluster.standalone=[lock]"), ["cluster.standalone=lock was set", "counter"]),
        ((TCP, "strategy=sar"), ["cluster.rendezvous=tcp://127.0.0.1:29500 was set", "set cluster=manual"]),
        (("cluster.rank=1",), ["cluster.rank=1 was set", "started by hand"]),
        (("strategy=counting", "cluster.standalone=[counter]"), ["need a rendezvous", "cluster=manual"]),
        (("strategy=counting", "strategy.servers=-1"), ["count=-1 for its role counter", "0 or more"]),
        (("verb=key",), ["cluster.key_file is not set"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_explained(
    overrides: tuple[str, ...], parts: list[str], counting: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = mistake(*overrides)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    "text", ["head:29500", "tcp://head", "tcp://head:0", "tcp://head:99999", "tcp://:1", "file://f", "file:///", "x"]
)
def test_a_garbled_rendezvous_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="it is not an address") as caught:
        rendezvous.parse(text)
    assert "tcp://host:port or file:///path" in str(caught.value)


def test_a_key_file_that_others_may_read_is_refused(
    counting: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entry.launch(composed("verb=key", "cluster.key_file=job.key"), {}, [])
    assert stat.S_IMODE(os.stat("job.key").st_mode) == 0o600
    assert "already exists" in mistake("verb=key", "cluster.key_file=job.key")
    os.chmod("job.key", 0o640)
    text = mistake(*MANUAL, TCP, "cluster.rank=0", "cluster.key_file=job.key")
    assert "cluster.key_file=job.key has mode 0640: other users may read or change it" in text
    assert "chmod 600 job.key" in text


# ------------------------------------------------------------------------------------------------- the meeting place


def test_the_file_of_a_rendezvous_leads_to_the_job_and_goes_with_it(tmp_path: Path) -> None:
    place = rendezvous.parse(f"file://{tmp_path}/meet")
    with rendezvous.hold(place, True) as held:
        assert held.socket is not None
        found = rendezvous.find(place, 1.0, True)
        assert (found.host, found.port) == (held.host, held.port)
        with pytest.raises(ConfigError, match="another process already listens at"), rendezvous.hold(place, True):
            pass
    assert not (tmp_path / "meet").exists()


def test_a_file_that_a_killed_job_left_is_taken_over(tmp_path: Path) -> None:
    place = rendezvous.parse(f"file://{tmp_path}/meet")
    with rendezvous.hold(place, True):
        stale = (tmp_path / "meet").read_text()
    (tmp_path / "meet").write_text(stale)
    with pytest.raises(ConfigError, match=r"nothing answered there within 0\.3 s"):
        rendezvous.find(place, 0.3, True)
    with rendezvous.hold(place, True) as held:
        assert rendezvous.find(place, LIMIT, True).port == held.port


def test_a_file_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    place = rendezvous.parse(f"file://{tmp_path}/thesis.txt")
    for attempt in (lambda: rendezvous.hold(place, True).__enter__(), lambda: rendezvous.find(place, 1.0, True)):
        with pytest.raises(ConfigError, match="that is not a file of a gtrain job"):
            attempt()
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_without_keys_a_file_leads_within_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = rendezvous.parse(f"file://{tmp_path}/meet")
    with rendezvous.hold(place, False) as held:
        assert held.host == "127.0.0.1"
        assert rendezvous.find(place, 1.0, False).port == held.port
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(ConfigError, match="can be reached by other machines, and cluster.key_file is not set"):
            rendezvous.find(place, 1.0, False)


def test_who_comes_before_rank_0_waits_for_it(tmp_path: Path) -> None:
    place, found = rendezvous.parse(f"file://{tmp_path}/meet"), []
    early = threading.Thread(target=lambda: found.append(rendezvous.find(place, LIMIT, True)))
    early.start()
    with rendezvous.hold(place, True) as held:
        early.join(LIMIT)
        assert [each.port for each in found] == [held.port]


def test_a_rendezvous_of_another_machine_cannot_be_held_here() -> None:
    with (
        pytest.raises(ConfigError, match="cannot listen there") as caught,
        rendezvous.hold(rendezvous.parse("tcp://1.2.3.4:99"), True),
    ):
        pass
    assert "start cluster.rank=0 on the machine that the address names" in str(caught.value)


# ------------------------------------------------------------------------------------------------- who belongs to a job


@pytest.fixture
def store() -> Iterator[KeyValueStore]:
    """An empty key-value store of a job."""
    listener = listen_here()
    server = KeyValueServer([listener.socket], None, None)
    yield KeyValueStore(listener.address, None, LIMIT)
    server.close()
    listener.close()


def test_a_rank_of_workers_is_taken_once_except_by_its_next_life(store: KeyValueStore) -> None:
    joining._claim(store, Slot("worker", 1, 1, 0), restarts=0)
    joining._claim(store, Slot("worker", 1, 1, 0), restarts=1)
    joining._claim(store, Slot("worker", 2, 2, 0), restarts=0)
    with pytest.raises(ConfigError, match=r"cluster.rank=1 was set; the job already has a machine of that number\."):
        joining._claim(store, Slot("worker", 1, 1, 0), restarts=0)


def test_all_machines_of_a_job_are_given_the_same_shape(store: KeyValueStore) -> None:
    for _ in range(2):
        joining._check_shape(store, "2 machines with 1 workers each")
    with pytest.raises(ConfigError, match="3 machines with 1 workers each were set here, and 2 machines with 1"):
        joining._check_shape(store, "3 machines with 1 workers each")


def test_servers_by_hand_take_the_free_ranks_of_a_role_that_is_left_to_them(store: KeyValueStore) -> None:
    plan = RolePlan("counter", count=3)
    store.set("role/counter", joining.BY_HAND)
    joining._check_by_hand(store, plan)
    assert [joining._free_rank(store, plan, wanted) for wanted in (None, 2, None)] == [0, 2, 1]
    with pytest.raises(ConfigError, match=r"cluster.rank=2 was set; the job already has a counter 2\."):
        joining._free_rank(store, plan, 2)
    with pytest.raises(ConfigError, match="all 3 servers of that role have been started"):
        joining._free_rank(store, plan, None)
    store.set("role/counter", joining.BY_AGENT)
    with pytest.raises(ConfigError, match="the job's own commands start these servers"):
        joining._check_by_hand(store, plan)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("pbg", "trainer.max_steps", 7),
        ("pbg", "trainer.val_check_interval", 0.5),
        ("ps", "trainer.precision", "bf16-mixed"),
        ("sar", "data.batch_size", 16),
        ("single", "data.num_neighbors", [10, 10]),
    ],
)
def test_a_limit_of_a_strategy_is_refused_and_those_without_it_are_named(name: str, key: str, value: Any) -> None:
    serves = backends.get(name).serves
    assert backends.get(name).load_strategy().serves is serves
    assert list(serves.violated({key: value})) == [key]
    others = backends.serving(backends.Traits(), {key: value})
    error = backends.not_honoured(name, key, serves.limits, {key: value}, others)
    assert f"{key}={as_typed(value)} was set; strategy={name} " in error.message
    assert name not in others and f"strategy={' or '.join(others)}" in str(error.hint)


def columns(first: str) -> list[dict[str, str]]:
    """The rows of a table of docs/choose-a-strategy.md by its columns' names."""
    page = (REPO / "docs" / "choose-a-strategy.md").read_text()
    table = page[page.index(f"| {first} |") :].partition("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    return [dict(zip((name.strip("` ") for name in head), row, strict=True)) for row in rows]


@pytest.mark.parametrize("name", ["pbg", "ps", "pyg", "sar", "single"])
def test_the_documentation_has_the_limits_of_each_strategy(name: str) -> None:
    rows, limits = columns("setting"), backends.get(name).serves.limits
    keys = {key for backend in backends.usable().values() for key in backend.serves.limits}
    for key in keys:
        (row,) = [row for row in rows if f"`{key}`" in row["setting"]]
        limit = limits.get(key)
        text = f"`{as_typed(limit.allowed[0])}`" if limit is not None else "any"
        assert row[name].startswith(text) or (limit is not None and limit.task and text in row[name]), (key, row[name])


@pytest.mark.parametrize("name", ["pbg", "ps", "pyg", "sar", "single"])
def test_the_documentation_says_which_models_each_strategy_trains(name: str) -> None:
    passing, per_node = "message-passing", "per-node"
    traits = [  # of the table's rows
        backends.Traits(passing, "node", False, False),
        backends.Traits(passing, "node", False, True),
        backends.Traits(passing, "node", True, True),
        backends.Traits(passing, "node", False, False),
        backends.Traits(passing, "link", False, True),
        backends.Traits("embedding", "link", False, True),
        backends.Traits("sparse", "node", False, True),
        backends.Traits(per_node, "node", False, False),
    ]
    for row, wanted in zip(columns("model"), traits, strict=True):
        assert row[name].startswith("yes" if wanted.refusal(backends.get(name).serves) is None else "no"), row


# ------------------------------------------------------------------------------------------------- places, sockets


def test_servers_are_dealt_to_machines_in_order() -> None:
    plans = [RolePlan("a", count=3), RolePlan("b", count=1), RolePlan("c", count=2, by_hand=True), RolePlan("worker")]
    places = [(s.label, s.node, s.local) for s, _ in server_slots(plans, 2, None)]
    assert places == [("a 0", 0, 0), ("a 1", 0, 1), ("a 2", 1, 0), ("b 0", 0, 0)]
    assert [s.label for s, _ in server_slots(plans, 2, 1)] == ["a 2"]
    assert [(s.rank, s.node, s.local) for s in worker_slots(3, 2, 1)] == [(2, 1, 0), (3, 1, 1)]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
            | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
            RankInfo(rank=3, size=4, local=1, local_size=2, machine=1, machines=2),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            RankInfo(rank=1, size=2, local=1, local_size=2, machine=0, machines=1),
        ),
    ],
)
def test_the_place_that_torchrun_gave(environ: dict[str, str], expected: RankInfo) -> None:
    assert launchers.LAUNCHERS["torchrun"].rank_info(environ) == expected


def test_the_place_that_slurm_gave() -> None:
    environ = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NNODES": "3"}
    expected = RankInfo(rank=5, size=6, local=1, local_size=2, machine=2, machines=3)
    assert launchers.LAUNCHERS["slurm"].rank_info(environ) == expected


def test_a_socket_within_the_machine_has_no_file_and_ends_with_its_holder() -> None:
    listener = listen_here()
    path = listener.address.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    assert not os.path.exists(listener.socket.getsockname())
    listener.close()
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(OSError):
        client.connect(path)


def test_a_tcp_socket_says_where_it_is() -> None:
    listener = listen_tcp("127.0.0.1")
    host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))):
        pass
    listener.close()
