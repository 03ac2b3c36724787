"""Partitions on a device: what is copied when, and that no change is lost between device, host and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from unit.pbg.test_buckets import make_tables

from gtrain.errors import ConfigError
from gtrain.model.kg.embedding import KGEmbedding
from gtrain_pbg.buckets import Bucket, bucket_order
from gtrain_pbg.device.lanes import Device
from gtrain_pbg.device.tables import CommonTensors, DeviceTables
from gtrain_pbg.typed import TypedTables

ROWS, PARTS = 400, 4
EVERY = [(i, j) for i in range(PARTS) for j in range(PARTS)]


class FullDevice(Device):
    """A device with little memory."""

    def __init__(self, free: int) -> None:
        super().__init__(torch.device("cpu"))
        self._free = free

    def free_bytes(self) -> int:
        return self._free


def on_device(tables: TypedTables, slots: int | None, device: Device | None = None) -> DeviceTables:
    device = device or Device(torch.device("cpu"))
    recipe = KGEmbedding(ROWS, 1, dimension=4, operator="none").recipe()
    common = CommonTensors(device, recipe, torch.float32, {}, None)
    copies = DeviceTables(device, tables, tables.tables[0]._shared, common, slots)
    tables.attach(copies)
    return copies


def train(tables: TypedTables, copies: DeviceTables, buckets: list[Bucket]) -> Tensor:
    """Add 1 on the device to all rows of each bucket's partitions, and return what all rows are to be then."""
    (table,) = tables.tables
    expected = table.fetch(torch.arange(ROWS))
    for visit in tables.buffer.plan([(bucket, 0) for bucket in buckets]):
        tables.begin_swaps(visit.before).result()
        swapping = tables.begin_swaps(visit.during)
        copies.begin(visit)
        for partition in visit.bucket:
            ends = copies.ends(0, partition)
            part = slice(ends.first, ends.first + ends.count)
            copies.tables[0].value[part] += 1
            copies.tables[0].state[part] += 2
            expected[table.partitions.orig_id[partition]] += 1
        copies.trained(visit)
        tables.trained(visit.bucket)
        swapping.result()
    tables.settle()
    return expected


@pytest.mark.parametrize("host", [2, 3, PARTS])
@pytest.mark.parametrize("slots", [2, 3, PARTS])
@pytest.mark.parametrize("order", ["affinity", "random", "sequential"])
def test_what_a_device_changes_arrives_in_memory_and_files(host: int, slots: int, order: str, tmp_path: Path) -> None:
    tables = make_tables(tmp_path, host, ROWS, PARTS)
    copies = on_device(tables, slots)
    assert copies.slots == min(host, slots)
    for epoch in range(2):
        buckets = bucket_order(order, PARTS, host, epoch)
        expected = train(tables, copies, buckets)
        assert torch.equal(tables.tables[0].fetch(torch.arange(ROWS)), expected)
    (tmp_path / "checkpoint").mkdir()
    expected = train(tables, copies, EVERY[:5])
    tables.save(tmp_path / "checkpoint")
    again = make_tables(tmp_path / "again", host, ROWS, PARTS)
    on_device(again, slots)
    again.load(tmp_path / "checkpoint")
    assert torch.equal(again.tables[0].fetch(torch.arange(ROWS)), expected)


def test_the_host_evicts_no_partition_that_is_on_its_way_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has lost its slot on a device with fewer slots than the host."""
    tables = make_tables(tmp_path, 3, ROWS, PARTS)
    device, waits = Device(torch.device("cpu")), []
    copies = on_device(tables, 2, device)
    for visit in tables.buffer.plan([((0, 1), 0), ((0, 2), 0)]):
        copies.begin(visit)
        copies.trained(visit)
    assert copies.saves == 1 and 1 not in copies._in
    monkeypatch.setattr(device.save, "synchronize", lambda: waits.append(1))
    copies.evicting(1)
    assert waits


def test_a_partition_stays_while_it_is_used_and_the_next_one_is_loaded_ahead(tmp_path: Path) -> None:
    tables = make_tables(tmp_path, PARTS, ROWS, PARTS)
    copies = on_device(tables, 3)
    train(tables, copies, [(0, 1), (1, 0), (1, 1), (1, 2), (2, 1)])
    # 0, 1 and 2, each once; nothing is written back before it is read.
    assert (copies.loads, copies.saves) == (3, 0)
    tables.tables[0].fetch(torch.arange(3))
    assert (copies.loads, copies.saves) == (3, 3)
    tables.tables[0].fetch(torch.arange(3))
    assert copies.saves == 3
    # 3 takes the slot of 0, which was needed least recently, while (2, 1) is trained.
    train(tables, copies, [(2, 1), (1, 3)])
    assert (copies.loads, copies.saves) == (4, 3)


def test_with_room_for_all_partitions_each_is_loaded_once(tmp_path: Path) -> None:
    tables = make_tables(tmp_path, PARTS, ROWS, PARTS)
    copies = on_device(tables, None)
    for epoch in range(3):
        train(tables, copies, bucket_order("random", PARTS, PARTS, epoch))
    assert copies.loads == PARTS


def test_partitions_that_do_not_fit_are_refused_with_the_number_that_does(tmp_path: Path) -> None:
    tables = make_tables(tmp_path, PARTS, ROWS, PARTS)
    size = tables.tables[0].partitions.largest * (4 + 1) * 4
    assert on_device(tables, None, FullDevice(5 * size)).slots == 3  # 70 % of it
    with pytest.raises(ConfigError, match=rf"a bucket needs 2 on the GPU: 2 \* {size:,} = {2 * size:,} bytes") as error:
        on_device(tables, None, FullDevice(2 * size))
    assert "set strategy.num_partitions=8 or more" in str(error.value)
