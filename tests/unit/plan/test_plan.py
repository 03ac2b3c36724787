"""The parts of ``gtrain plan`` against other ways to compute the same numbers."""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch
from helpers import REPO
from small_graphs import messy_graph, random_parts, stored

from gtrain.cli.auto import Candidate, race_folders
from gtrain.errors import ConfigError
from gtrain.graph.shard.graph import load_shard
from gtrain.memory.limits import group_limit, oom_kills, usable_memory
from gtrain.plan import machine
from gtrain.plan.counts import assume_parts, count_parts, cut_of_ranges
from gtrain.plan.estimate import ARITHMETIC, BANDWIDTH, NETWORK, SENT, Estimate


def test_terms_are_their_formulas_with_the_numbers_put_in() -> None:
    estimate = Estimate(hidden=0.5)
    estimate.add(SENT, "rows", "rows * width * item", rows=10, width=3, item=4)
    estimate.add(SENT, "once", "ceil(bytes / epochs)", bytes=7, epochs=2)
    assert estimate.total(SENT) == 124
    estimate.add(ARITHMETIC, "products", "flop / flops", flop=6e9, flops=2e9)
    estimate.add(BANDWIDTH, "sums", "one", one=1.0)
    estimate.add(NETWORK, "transfer", "two", two=2.0)
    # 4 s on the cores, and half of the 2 s of transfers hidden behind them.
    assert estimate.seconds == 5 and estimate.limit == ARITHMETIC


def test_parts_are_counted_as_shards_are(tmp_path: Path) -> None:
    store = stored(tmp_path / "store", messy_graph(), random_parts(40, 3))
    parts = count_parts(store)
    for part in range(3):
        shard = load_shard(store, part)
        assert parts.halo[part] == shard.num_halo and parts.nodes[part] == shard.num_local
        by_block = [len(halo) for halo in shard.halo]
        assert parts.reads[part] == [by_block[(part - owner) % 3] for owner in range(3)]
        source, target = shard.edge_index
        for r in range(1, 3):
            block = (source >= shard.block_ptr[r]) & (source < shard.block_ptr[r + 1])
            assert parts.targets[part][(part - r) % 3] == len(target[block].unique())
    assert sum(parts.served) == sum(parts.halo)
    assert parts.cut == store.manifest.partition.edge_cut


def test_ranges_of_parts_have_the_cut_of_the_parts(tmp_path: Path) -> None:
    data = messy_graph()
    store = stored(tmp_path / "store", data, torch.arange(40) // 10)
    # Ranges of equal size are these parts.
    assert cut_of_ranges(store, 4) == store.manifest.partition.edge_cut / store.num_edges


def test_assumed_halo_is_between_none_and_all_remote_nodes() -> None:
    none, some, many = (assume_parts(1000, 10000, 600, 4, cut) for cut in (0.0, 0.25, 1.0))
    assert none.halo == [0] * 4
    # 625 cut edges start at 750 remote nodes: 750 * (1 - exp(-625 / 750)).
    assert some.halo[0] == pytest.approx(424.05, abs=0.01)
    assert some.halo[0] < many.halo[0] < 750


def group(root: Path, lines: str, files: dict[str, str]) -> Path:
    """A machine of 8 GiB in a folder, whose process is in these control groups."""
    for name, text in {"proc/meminfo": "MemTotal: 8388608 kB\n", "proc/self/cgroup": lines, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": "2147483648\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 2 << 30),
        ("4:cpu:/x\n3:memory:/x\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1073741824\n"}, 1 << 30),
        # In a container of version 1 the path is the host's, and the top of the mount is the group.
        ("3:memory:/docker/1\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "3221225472\n"}, 3 << 30),
        ("3:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, None),
    ],
)
def test_the_limit_is_the_smallest_of_the_control_groups(
    lines: str, files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    root = group(tmp_path, lines, files)
    assert group_limit(root) == limit
    assert usable_memory(root) == (limit or 8 << 30)


@pytest.mark.parametrize(
    ("lines", "files", "kills"),
    [
        ("0::/a\n", {"sys/fs/cgroup/a/memory.events": "oom 5\noom_kill 3\n", "proc/vmstat": "oom_kill 9\n"}, 3),
        (
            "3:memory:/x\n0::/\n",
            {"sys/fs/cgroup/memory/x/memory.oom_control": "under_oom 0\noom_kill 2\n", "proc/vmstat": "oom_kill 9\n"},
            2,
        ),
        ("0::/\n", {"proc/vmstat": "nr_free_pages 4\noom_kill 9\n"}, 9),
        ("0::/\n", {}, 0),
    ],
)
def test_kills_for_lack_of_memory_are_those_of_the_control_group(
    lines: str, files: dict[str, str], kills: int, tmp_path: Path
) -> None:
    assert oom_kills(group(tmp_path, lines, files)) == kills


def test_a_machine_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("name: rack\ncores: 36\nmemory: 256e9\n")
    loaded = machine.load(str(file))
    assert (loaded.name, loaded.cores, loaded.memory) == ("rack", 36, 256e9)
    file.write_text("core: 36\n")
    with pytest.raises(ConfigError, match=r"core.*\nHINT: the keys are name, count, cores"):
        machine.load(str(file))
    file.write_text("cores: 0\n")
    with pytest.raises(ConfigError, match="cores=0"):
        machine.load(str(file))


def test_constants_are_kept_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.calibration() == {} and machine.this_machine().name.endswith("not calibrated")
    assert machine.keep({"flops": 7e10, "unknown": 1}) == tmp_path / "gtrain" / "machine.json"
    assert machine.this_machine().flops == 7e10


def test_imports_take_more_with_a_torch_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = tmp_path / "torch" / "lib" / "libtorch_cuda.so"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.setattr(machine, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    assert machine.this_machine().imports == 4e8
    library.parent.mkdir()
    library.touch()
    assert machine.this_machine().imports == 6e8
    assert machine.keep({"imports": 5e8}) is not None
    assert machine.this_machine().imports == 5e8


def test_each_preset_has_its_published_sizes() -> None:
    texts = {path.stem: path.read_text() for path in (REPO / "conf" / "experiment").glob("*.yaml")}
    counted = {name for name, text in texts.items() if "override /data: counts" in text}
    assert counted == {"papers100m", "twitter2010", "freebase", "mag240m", "clicks"}


def test_two_modes_of_a_strategy_race_in_two_folders() -> None:
    first, second, other = Candidate("sar", ("mode=1",), 1), Candidate("sar", ("mode=3",), 2), Candidate("pyg", (), 3)
    assert list(race_folders(Path("run"), (first, second)).values()) == [
        Path("run/race/sar-mode-1"),
        Path("run/race/sar-mode-3"),
    ]
    assert list(race_folders(Path("run"), (first, other)).values()) == [Path("run/race/sar"), Path("run/race/pyg")]
