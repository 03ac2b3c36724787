"""What is on a device: partitions in slots, copied from and to the host's slots while the device computes, and what
the relations and the tables without partitions have.

The host's slots (:mod:`gtrain_pbg.typed`) are what files, servers, checkpoints and evaluation read and write. A
partition that was trained on the device is written back to its host slot before any of them reads it: when its device
slot is needed for another, when the host evicts it, and when tables are read. It stays on the device otherwise.

Each table is one tensor with the slots one after the other, so that rows of all partitions have one numbering and a
captured step serves all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.nn.recipe import ModelRecipe
from gtrain_pbg.buckets import ScheduledBucket
from gtrain_pbg.device.batches import Ends
from gtrain_pbg.device.kernels import DeviceTable, PackedOperators
from gtrain_pbg.device.lanes import Device, Event
from gtrain_pbg.device.step import DeviceParameter, fits
from gtrain_pbg.partition_store import ARRAYS
from gtrain_pbg.typed import TypedTables

FOR_PARTITIONS = 0.7
"""Share of the free memory that partitions may have; buffers of batches have the rest."""


class CommonTensors:
    """Relation parameters, tables that are not partitioned, and their optimizer state: on the device and the host.

    Args:
        device: that trains.
        recipe: of the model.
        dtype: of all tensors.
        host: the host's tensors by name: relation parameters and their state as ``<name>`` and ``<name>.state``, tables
            as ``<type>.rows`` and ``<type>.state``.
        exchanging: held while the host's tensors are exchanged with other machines; None: this machine alone trains.

    Attributes:
        changed: whether the device's tensors were trained since the host's were brought up to date.
        operators: by group, parameters of both directions in one tensor, where the fused step trains the group.
        tensors: the device's tensors by name.
    """

    def __init__(
        self,
        device: Device,
        recipe: ModelRecipe,
        dtype: torch.dtype,
        host: Mapping[str, Tensor],
        exchanging: threading.Lock | None,
    ) -> None:
        self._dtype = dtype
        self._device, self._host, self._exchanging = device, host, exchanging
        self._last: dict[str, Tensor] = {}  # the host's values that the device's started from, on several machines
        self.changed = False
        self.tensors: dict[str, Tensor] = {}
        self.operators: dict[int, PackedOperators] = {}
        for number, group in enumerate(recipe.groups):
            if fits(group):
                self.operators[number] = self._pack(group.operator, list(recipe.names_of(number).values()))
        for name, tensor in host.items():
            if name not in self.tensors:
                self.tensors[name] = torch.empty_like(tensor, device=device.name)
        self.load()

    def _pack(self, operator: str, names: list[str]) -> PackedOperators:
        """Allocate the parameters of a group in one tensor."""
        if not names:
            none = self._device.empty(2, 1, 0, dtype=self._dtype)
            return PackedOperators(operator, none, none, none)
        packed = {}
        for suffix in ("", ".state"):
            like = self._host.get(names[0] + suffix)
            shape = (len(self._host[names[0]]), 0) if like is None else like.shape
            whole = self._host[names[0]].new_zeros(len(names), *shape, device=self._device.name)
            packed[suffix] = whole
            for name, part in zip(names, whole, strict=True):
                if name + suffix in self._host:
                    self.tensors[name + suffix] = part
        return PackedOperators(operator, packed[""], packed[".state"], torch.zeros_like(packed[""]))

    def load(self) -> None:
        """Overwrite the device's tensors by the host's."""
        self.changed = False
        self._device.compute.follow()
        with self._device.compute():
            for name, tensor in self.tensors.items():
                tensor.copy_(self._host[name])
        self._device.compute.synchronize()
        if self._exchanging is not None:
            self._last = {name: tensor.clone() for name, tensor in self._host.items()}

    def save(self) -> None:
        """Bring the host up to date: overwrite it, or on several machines exchange changes with it."""
        was_changed, self.changed = self.changed, False
        if self._exchanging is not None:
            self._exchange(self._exchanging)
            return
        if not was_changed:
            return
        with self._device.compute():
            for name, tensor in self.tensors.items():
                self._host[name].copy_(tensor)
        self._device.compute.synchronize()

    def _exchange(self, lock: threading.Lock) -> None:
        """Add the device's changes to the host, and those of other machines to the device."""
        with self._device.compute():
            now = {name: tensor.cpu() for name, tensor in self.tensors.items()}
            with lock:
                for name, value in now.items():
                    self._host[name].add_(value - self._last[name])
                    self._last[name] = self._host[name].clone()
            for name, tensor in self.tensors.items():
                tensor.add_((self._last[name] - now[name]).to(tensor.device))


@dataclass
class DeviceSlot:
    """A slot of the device.

    Attributes:
        partition: that is in it.
        host: slot of the host that the partition is in.
        loaded: event after which it is on the device.
        used: event after which the last bucket that trained it is done.
        saved: event after which it is written back.
        changed: whether it differs from the host.
        turn: number of the last bucket that needed it.
    """

    partition: int
    host: int
    loaded: Event = None
    used: Event = None
    saved: Event = None
    changed: bool = False
    turn: int = 0


class DeviceTables:
    """The tables of all entity types on a device.

    The training thread and the thread that moves the host's partitions call it.

    Args:
        device: that trains.
        tables: on the host.
        host: the host's memory, by names of :meth:`TypedTables.tensors`.
        common: tables that are not partitioned.
        slots: partitions on the device at a time; None: as many as fit.

    Attributes:
        tables: by entity type.
        slots: partitions on the device at a time.
        common: the same as above.
        lock: held while copies are launched.
        loads, saves: partitions copied to and from the device so far.
    """

    def __init__(
        self,
        device: Device,
        tables: TypedTables,
        host: Mapping[str, Tensor],
        common: CommonTensors,
        slots: int | None = None,
    ) -> None:
        self._device, self._host_tables, self._host, self.lock = device, tables, host, threading.RLock()
        self.common = common
        self.slots = self._choose_slots(slots)
        self.tables: list[DeviceTable] = []
        for entity in tables.types:
            names = [f"{entity.name}.{array}" for array in ARRAYS]
            if entity.is_partitioned:
                sizes = [(self.slots * entity.partitions.largest, host[name].size(2)) for name in names]
                parts = [device.empty(*size, dtype=tables.dtype) for size in sizes]
            else:
                parts = [common.tensors[name].flatten(0, 1) for name in names]
            self.tables.append(DeviceTable(*parts))
        self._in: dict[int, int] = {}  # slot of each partition on the device
        self._slot: dict[int, DeviceSlot] = {}
        self._resident: dict[int, int] = {}  # host slot of each partition in the host's memory
        self._ahead: tuple[int, ...] = ()
        self._needed: set[int] = set()
        self.loads = self.saves = self._turn = 0
        self.reset()

    def _choose_slots(self, wanted: int | None) -> int:
        """Return how many partitions are on the device at a time.

        Raises:
            ConfigError: less than the two of a bucket fit.
        """
        most = min(self._host_tables.buffer.slots, len(self._host_tables.nodes.orig_id))
        least, free, size = min(2, most), self._device.free_bytes(), self.partition_bytes
        fitting = most if free is None or not size else int(free * FOR_PARTITIONS) // size
        if fitting < least:
            assert free is not None
            count = len(self._host_tables.nodes.orig_id)
            raise ConfigError(
                f"strategy.num_partitions={count} was set; a partition has {size:,} bytes of embeddings and optimizer "
                f"state, and a bucket needs {least} on the GPU: {least} * {size:,} = {least * size:,} bytes, while "
                f"{FOR_PARTITIONS:.0%} of the {free:,} bytes that are free may be used for partitions.",
                hint=f"set strategy.num_partitions={count * -(-least * size // max(1, int(free * FOR_PARTITIONS)))} "
                "or more, or lower model.dimension.",
            )
        return max(least, min(most, fitting if wanted is None else wanted))

    @property
    def partition_bytes(self) -> int:
        """Bytes of the largest partition of all partitioned types."""
        return sum(
            self._host[f"{entity.name}.{array}"][0].nbytes
            for entity in self._host_tables.types
            if entity.is_partitioned
            for array in ARRAYS
        )

    def ends(self, number: int, partition: int) -> Ends:
        """Return where the rows of a type's partition are."""
        entity, rows = self._host_tables.types[number], len(self.tables[number].value)
        if not entity.is_partitioned:
            return Ends(0, entity.spec.rows, rows)
        first = self._in[partition] * entity.partitions.largest
        return Ends(first, entity.partitions.size(partition), rows)

    # ------------------------------------------------------------------------------------------ training

    def begin(self, scheduled: ScheduledBucket) -> None:
        """Have a bucket's partitions on the device, and begin to load those of the next bucket."""
        with self.lock:
            bucket = dict(zip(scheduled.bucket, scheduled.slots, strict=True))
            self._resident |= bucket
            self._turn += 1
            self._ahead, self._needed = scheduled.ahead, set(scheduled.bucket) | set(scheduled.ahead)
            for partition, host in bucket.items():
                if partition not in self._in:
                    self._load(partition, host, set(bucket))
                slot = self._slot[self._in[partition]]
                slot.turn = self._turn
                self._device.compute.wait(slot.loaded)
            for partition in scheduled.ahead:
                if partition in self._resident:
                    self._prefetch(partition)

    def trained(self, scheduled: ScheduledBucket) -> None:
        """Mark a bucket's partitions as changed by all work that was launched so far."""
        with self.lock:
            used = self._device.compute.record()
            self.common.changed = True
            for partition in scheduled.bucket:
                slot = self._slot[self._in[partition]]
                slot.used, slot.changed = used, True

    def _prefetch(self, partition: int) -> None:
        """Load a partition of the next bucket, unless all slots have partitions of this bucket or the next."""
        if partition not in self._in:
            self._load(partition, self._resident[partition], self._needed)

    def _load(self, partition: int, host: int, pinned: set[int]) -> None:
        """Load a partition into a free slot, or into one whose partition is written back first, if there is one."""
        number = next((n for n in range(self.slots) if n not in self._slot), None)
        if number is None:
            victims = [n for n, slot in self._slot.items() if slot.partition not in pinned]
            if not victims:
                return
            # The one that was needed least recently: the order of the later buckets is not known here.
            number = min(victims, key=lambda n: self._slot[n].turn)
            old = self._slot.pop(number)
            self._save(old, number)
            del self._in[old.partition]
            self._device.load.wait(old.saved)
            # Not changed since it was loaded, it may still be read by the last bucket that used it.
            self._device.load.wait(old.used)
        with self._device.load():
            for source, target in self._pairs(number, partition, host):
                target.copy_(source, non_blocking=True)
            loaded = self._device.load.record()
        self.loads += 1
        self._in[partition], self._slot[number] = number, DeviceSlot(partition, host, loaded, turn=self._turn)

    def _save(self, slot: DeviceSlot, number: int) -> None:
        """Begin to write a partition back if it was changed."""
        if not slot.changed:
            return
        self._device.save.wait(slot.used)
        with self._device.save():
            for target, source in self._pairs(number, slot.partition, slot.host):
                target.copy_(source, non_blocking=True)
            slot.saved = self._device.save.record()
        slot.changed = False
        self.saves += 1

    def _pairs(self, number: int, partition: int, host: int) -> list[tuple[Tensor, Tensor]]:
        """Return the arrays of a partition on the host and on the device."""
        pairs = []
        for entity, table in zip(self._host_tables.types, self.tables, strict=True):
            if entity.is_partitioned:
                size, first = entity.partitions.size(partition), number * entity.partitions.largest
                for array, whole in zip(ARRAYS, table, strict=True):
                    pairs.append((self._host[f"{entity.name}.{array}"][host, :size], whole[first : first + size]))
        return [pair for pair in pairs if pair[0].numel()]

    # ------------------------------------------------------------------------------------------ the host's slots

    def evicting(self, partition: int) -> None:
        """Called before the host evicts a partition: write it back, and forget it."""
        with self.lock:
            self._resident.pop(partition, None)
            number = self._in.pop(partition, None)
            loaded = None
            if number is not None:
                slot = self._slot.pop(number)
                self._save(slot, number)
                # The next partition may be loaded into the slot once this one is neither read nor written back.
                for event in (slot.used, slot.saved):
                    self._device.load.wait(event)
                loaded = slot.loaded
        _happened(loaded)
        # A partition that has lost its slot on the device may still be on its way to the host.
        self._device.save.synchronize()

    def filled(self, partition: int, host: int) -> None:
        """Called when the host has loaded a partition into a slot."""
        with self.lock:
            self._resident[partition] = host
            if partition in self._ahead:
                self._prefetch(partition)

    def flush(self) -> None:
        """Write all changed partitions back to the host, and the tables that are not partitioned."""
        with self.lock:
            for number, slot in self._slot.items():
                self._save(slot, number)
            self._device.save.synchronize()
        # Tables that are not partitioned are read too.
        if self.common.changed:
            self.common.save()

    def reset(self) -> None:
        """Forget what is on the device: the host's slots have other contents."""
        with self.lock:
            self._device.compute.synchronize()
            self._device.load.synchronize()
            self._device.save.synchronize()
            self._in, self._slot, self._resident = {}, {}, dict(self._host_tables.buffer.slot_of)

    def refresh_common(self) -> None:
        """Copy the host's relation parameters and tables without partitions to the device."""
        self.common.load()


def _happened(event: Event) -> None:
    """Block until an event has happened."""
    if event is not None:
        event.synchronize()


def parameters_of(common: CommonTensors, recipe: ModelRecipe, number: int) -> dict[str, DeviceParameter]:
    """Return the parameters of a group by the names of :attr:`EdgeRecipe.parameters`."""
    made: dict[str, DeviceParameter] = {}
    result = {}
    for name, shared in recipe.names_of(number).items():
        if shared not in made:
            made[shared] = DeviceParameter(common.tensors[shared], common.tensors[f"{shared}.state"])
        result[name] = made[shared]
    return result
