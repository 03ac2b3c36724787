"""What servers keep for a worker that dies, and how it finds its way back."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from gtrain.errors import ConfigError
from gtrain.launch.slot import describe
from gtrain.strategy import checkpoint as checkpoints
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain.strategy.metric_states import METRICS
from gtrain_ps.packing import pack, unpack
from gtrain_ps.server.collectives import CollectiveResults, Collectives, collective_id
from gtrain_ps.server.journal import Journal
from gtrain_ps.server.memory import ServerMemory
from gtrain_ps.server.replay import StepHistory
from gtrain_ps.strategy import PsStrategy
from gtrain_ps.worker.group import ServedGroup
from gtrain_ps.worker.lightning_state import added_by_hooks, shifted_loops
from gtrain_ps.worker.progress import ProgressRecorder, _numpy_state
from gtrain_ps.worker.restarts import RestartingStrategy
from gtrain_sar.strategy import SarStrategy


def test_plain_values_come_back_as_they_were() -> None:
    value = {
        "numbers": [1, 2.5, None, True, float("inf")],
        7: (torch.arange(3), torch.zeros(2, 0), torch.tensor(1.5, dtype=torch.float64)),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    found = unpack(pack(value))
    assert found["numbers"] == value["numbers"] and list(found) == list(value)
    assert isinstance(found[7], tuple)
    for mine, theirs in zip(found[7], value[7], strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert found["half"].dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="contains a object, which strategy=ps cannot keep"):
        pack({"callback": object()})


def test_numbers_in_tensors_keep_their_type_and_last_digit() -> None:
    given = [torch.tensor(value, dtype=kind) for kind in (torch.float32, torch.float64) for value in (0.1, math.nan)]
    given += [torch.tensor(2**62 + 1), torch.tensor(0.1, dtype=torch.bfloat16), torch.tensor(True)]
    for mine, theirs in zip(unpack(pack(given)), given, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == ()
        assert torch.equal(mine.view(1).view(torch.uint8), theirs.view(1).view(torch.uint8))


@pytest.mark.parametrize("draw", [np.random.rand, lambda: np.random.shuffle([1, 2]), lambda: np.random.seed(3)])
def test_a_drawn_random_number_is_noticed(draw: Any) -> None:
    before = _numpy_state()
    assert _numpy_state() == before
    draw()
    assert _numpy_state() != before


def test_random_numbers_go_on_after_packing() -> None:
    torch.manual_seed(3)
    kept, expected = pack(checkpoints.rng_state()), torch.rand(5)
    state = unpack(kept)
    checkpoints.set_rng_state({**state, "torch": state["torch"].clone()})
    assert torch.equal(torch.rand(5), expected)


def test_slots_keep_the_last_steps_and_outlive_their_server() -> None:
    memory = ServerMemory()
    slots = StepHistory(3, memory)
    for step in range(7):
        slots.write(step, {"product/0/0": torch.full((10 * (step + 1),), float(step))})
    again = StepHistory(3, memory)
    assert [bool(again.read(step)) for step in range(-1, 8)] == [False] * 5 + [True] * 3 + [False]
    assert torch.equal(again.read(6)["product/0/0"], torch.full((70,), 6.0))


def told(gathers: Collectives, worker: int, where: int, number: float) -> list[float] | None:
    """What a worker that gives a number is answered; None if it has to wait."""
    answer = gathers.contribute(worker, where, torch.tensor([number]))
    return [float(one) for one in answer.result().tensors] if answer.done() else None  # type: ignore[union-attr]


def test_a_worker_that_comes_back_is_answered_what_its_life_before_was_and_is_waited_for() -> None:
    results = CollectiveResults(4, ServerMemory())
    gathers = Collectives(2, results)
    assert told(gathers, 0, collective_id(0, 0), 0.0) is None
    assert told(gathers, 1, collective_id(0, 0), 1.0) == [0.0, 1.0]
    assert told(gathers, 0, collective_id(0, 1), 5.0) is None
    gathers.drop(0)  # it died, and does the step again
    assert told(gathers, 0, collective_id(0, 0), 9.0) == [0.0, 1.0]
    assert gathers.missing() == set() and results.passed == collective_id(0, 0) + 1
    waiting = gathers.contribute(1, collective_id(0, 1), torch.tensor([6.0]))
    assert gathers.missing() == {0} and not waiting.done()
    assert told(gathers, 0, collective_id(0, 1), 5.0) == [5.0, 6.0]
    assert [float(one) for one in waiting.result().tensors] == [5.0, 6.0]  # type: ignore[union-attr]


def test_what_all_gave_counts_after_the_server_and_every_worker_died() -> None:
    """Each life of the server finds what the lives before were told in the last four steps, whatever its size."""
    memory = ServerMemory()
    for step in range(7):
        gathers = Collectives(2, CollectiveResults(4, memory))
        for index in range(step):
            rows = torch.arange(100.0 * index), torch.full((3, step), step, dtype=torch.int16)
            for worker, row in enumerate(rows):
                gathers.contribute(worker, collective_id(step, index), row)
        assert told(gathers, 1, collective_id(step, step), 0.5) is None
    exchanges = CollectiveResults(4, memory)
    gathers = Collectives(2, exchanges)
    assert exchanges.passed == collective_id(6, 5) + 1
    assert told(gathers, 0, collective_id(6, 6), 0.25) is None  # the others had not answered
    for step in range(7):
        kept = [index for index in range(7) if exchanges.get(collective_id(step, index)) is not None]
        assert kept == (list(range(step)) if step > 2 else [])
    again = gathers.contribute(1, collective_id(6, 4), torch.tensor([9.0])).result()  # by one that saw a later table
    assert again is not None and torch.equal(again.tensors[0], torch.arange(400.0))
    assert torch.equal(again.tensors[1], torch.full((3, 6), 6, dtype=torch.int16))


def test_loops_begin_with_a_later_step_of_the_epoch() -> None:
    counts = {"ready": 9, "started": 9, "processed": 8, "completed": 8}
    done = {"ready": 9, "completed": 8}
    loops = {
        "state_dict": {"combined_loader": [{"epoch": 1, "done": 3}]},
        "epoch_loop.state_dict": {"_batches_that_stepped": 8},
        "epoch_loop.batch_progress": {
            "total": dict(counts),
            "current": {"ready": 3, "started": 3, "processed": 2, "completed": 2},
            "is_last_batch": True,
        },
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {name: {"total": dict(done), "current": dict(done)} for name in ("step", "zero_grad")}
        },
    }
    later = shifted_loops(loops, 2)
    assert later["epoch_loop.batch_progress"]["current"] == dict.fromkeys(counts, 4)
    assert later["epoch_loop.batch_progress"]["total"] == {"ready": 10, "started": 10, "processed": 9, "completed": 9}
    assert later["epoch_loop.state_dict"]["_batches_that_stepped"] + 1 == 8 + 2
    assert later["state_dict"]["combined_loader"] == [{"epoch": 1, "done": 4}]
    step = later["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    assert step["total"] == {"ready": 10, "completed": 10}
    assert loops["epoch_loop.batch_progress"]["total"] == counts


class Replaying(Group):
    """A group of one that was through its first collectives before."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.before = before

    def passed(self, count: int = 1) -> bool:
        return self.before >= count

    def barrier(self) -> None:
        self.before -= 1


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_checkpoint_whose_writer_died_is_complete_wherever_it_was(before: int, tmp_path: Path) -> None:
    """A writer that comes back leaves alone what it and the others had done when they last met."""
    module, path = torch.nn.Linear(2, 2), tmp_path / "last.ckpt"
    state = {"state_dict": module.state_dict(), "epoch": 1, "global_step": 2}
    part = path.with_name("last.ckpt.part")
    if before == 3:
        checkpoints.save(Group(), path, state, {"mine": 1}, module)
    elif before:
        part.mkdir()
        torch.save(state, part / checkpoints.TRAINER)
        if before == 2:
            torch.save({"rng": checkpoints.rng_state(), "shard": {"mine": 1}}, part / "rank-0.pt")
    checkpoints.save(Replaying(before), path, state, {"mine": 1}, module)
    loaded = checkpoints.load(Group(), path, module, restore_rng=False)
    assert loaded.shard == {"mine": 1} and loaded.checkpoint["global_step"] == 2 and not part.exists()


def test_a_writer_that_returns_still_skips_what_was_written_after_it_gave_its_state() -> None:
    """All had met once over the checkpoint: its folder is there, and may have files of the others."""
    servers = SimpleNamespace(step=4, passed=lambda: collective_id(4, 0) + 1)
    group = ServedGroup(0, 2, servers, Counters())  # type: ignore[arg-type]
    group.repeating = True
    strategy = SimpleNamespace(group=group, _catch_up=lambda: None, served_tables={}, global_rank=0)
    strategy.world_size, strategy.servers = 2, SimpleNamespace(count=lambda role: 2)
    assert PsStrategy.shard_state(strategy) == {METRICS: {}}  # type: ignore[arg-type]
    assert group.passed()


def test_a_full_disk_is_named_with_the_file_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, journal = ServerMemory(), Journal(tmp_path / "disk", {}, log_bytes=500)
    journal.load(memory)
    assert list(journal.records()) == []

    def no_space(descriptor: int, *_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, step in (
        ("log-0", lambda: journal.append({"number": 1})),
        ("part", lambda: journal.take_snapshot(memory)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", no_space)
            patch.setattr(os, "fsync", no_space)
            with pytest.raises(OSError, match="No space left on device") as failed:
                step()
        told = describe(failed.value)
        assert told["message"] == f"{tmp_path}/disk/{name} cannot be written: no space left on device." and told["user"]


def test_a_log_is_read_up_to_what_was_cut_off(tmp_path: Path) -> None:
    def opened() -> tuple[ServerMemory, list[int], Journal]:
        memory, journal = ServerMemory(), Journal(tmp_path / "disk", {"seed": 1}, log_bytes=500)
        journal.load(memory)
        return memory, [record["number"] for record in journal.records()], journal

    memory, found, journal = opened()
    assert found == [] and memory.version == 0
    for number in range(3):
        journal.append({"number": number, "row": torch.full((20,), float(number))})
    log = tmp_path / "disk" / "log-0"
    whole = log.read_bytes()
    log.write_bytes(whole[:-1])  # the machine stopped while it wrote
    assert opened()[1] == [0, 1]
    log.write_bytes(whole[:-5] + b"?" + whole[-4:])
    assert opened()[1] == [0, 1]
    journal = opened()[2]
    journal.append({"number": 7})  # behind what is whole
    assert opened()[1] == [0, 1, 7]

    memory, _, journal = opened()
    memory.tensor("rows", (3, 5), torch.float64).fill_(2.5)
    memory.tensor("none", (0,), torch.int32)
    memory.set_note("tables", {"wide": 3})
    memory.set_version(4)
    journal.append({"number": 8})
    assert journal.snapshot_due
    journal.take_snapshot(memory)
    assert not journal.snapshot_due and sorted(path.name for path in (tmp_path / "disk").iterdir()) == [
        "job.json",
        "log-1",
        "snapshot-1",
    ]
    journal.append({"number": 9})
    again, found, journal = opened()
    assert found == [9] and again.version == 4 and again.notes == {"tables": {"wide": 3}}
    assert torch.equal(again.tensor("rows", (3, 5), torch.float64), torch.full((3, 5), 2.5, dtype=torch.float64))
    with pytest.raises(ConfigError, match="of a job that did not end, with another seed"):
        Journal(tmp_path / "disk", {"seed": 2})
    journal.remove()
    assert not (tmp_path / "disk").exists()


def test_all_workers_learn_that_the_result_of_a_collective_could_not_be_kept() -> None:
    def full(collective: int, tensors: list[torch.Tensor]) -> None:
        raise OSError(errno.ENOSPC, "no space")

    collectives = Collectives(2, CollectiveResults(2, ServerMemory()), full)
    waits = collectives.contribute(0, 7, torch.ones(1))
    with pytest.raises(OSError, match="no space"):
        collectives.contribute(1, 7, torch.ones(1))
    with pytest.raises(OSError, match="no space"):
        waits.result(0)


def test_zeros_behind_a_log_and_a_job_without_its_settings(tmp_path: Path) -> None:
    """What a file system may leave of writes that were not complete when the machine stopped."""

    def opened() -> tuple[list[int], Journal]:
        journal = Journal(tmp_path / "disk", {"seed": 1})
        journal.load(ServerMemory())
        return [record["number"] for record in journal.records()], journal

    path = tmp_path / "disk" / "job.json"
    opened()
    path.write_text("")
    opened()[1].append({"number": 3})
    assert path.read_text() == '{"seed": 1}'
    with open(tmp_path / "disk" / "log-0", "ab") as log:
        log.write(bytes(4096))
    recorded, journal = opened()
    assert recorded == [3]
    journal.append({"number": 4})
    assert opened()[0] == [3, 4]
    path.write_bytes(bytes(11))
    with pytest.raises(ConfigError, match="job.json is not JSON"):
        opened()


def test_tensors_that_are_replaced_are_recorded_again() -> None:
    module = pl.LightningModule()
    module.layer = torch.nn.Linear(2, 2)
    module.register_buffer("mean", torch.zeros(2))
    trainer = SimpleNamespace(lr_scheduler_configs=[], optimizers=[], current_epoch=0, lightning_module=module)
    recorder: Any = SimpleNamespace(_trainer=trainer, _hooked=False)
    signatures = [ProgressRecorder._run_signature(recorder)]
    module.mean += 1.0
    module.layer.weight.data.zero_()
    assert ProgressRecorder._run_signature(recorder) == signatures[0]
    held = [module.mean, module.layer.weight.data]  # as the record of the state does
    module.mean = module.mean * 0.9 + 1.0
    signatures.append(ProgressRecorder._run_signature(recorder))
    module.layer.weight.data = torch.ones(2, 2)
    signatures.append(ProgressRecorder._run_signature(recorder))
    assert held and len(set(map(str, signatures))) == 3


class Hooked(pl.LightningModule):
    """Has state in its hooks."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].clear()
        checkpoint["words"] = ["a", "b"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass


class Written(pl.Callback):
    """Writes what nobody reads."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        raise AssertionError("no checkpoint is written")


class Counting(pl.Callback):
    """Has state in its hooks; perhaps in place of the module's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[self.name] = 3

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        pass


def test_state_that_is_in_hooks_of_checkpoints_alone_is_kept_or_refused() -> None:
    trainer: Any = SimpleNamespace(lightning_module=Hooked(), callbacks=[Counting("count"), Written()])
    checkpoint = {"state_dict": {"weight": torch.ones(1)}, "epoch": 1}
    assert added_by_hooks(trainer, checkpoint) == {"words": ["a", "b"], "count": 3}
    assert checkpoint == {"state_dict": {"weight": torch.ones(1)}, "epoch": 1}
    trainer.callbacks.append(Counting("state_dict"))
    with pytest.raises(ConfigError, match="Counting.on_save_checkpoint replaces 'state_dict' in a checkpoint"):
        added_by_hooks(trainer, checkpoint)


def test_a_step_without_a_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows would be taken for those of the next one."""
    monkeypatch.setattr(RestartingStrategy, "training_step", lambda self, *args: None)
    with pytest.raises(ConfigError, match="training_step returned None; .* a step with every batch") as refused:
        PsStrategy().training_step(None)
    assert refused.value.hint == "return `loss * 0` for a batch that is to be skipped."


def test_gradients_that_a_callback_accumulates_are_refused(tmp_path: Path) -> None:
    module = pl.LightningModule()
    for factors in ({0: 2}, {1: 3, 4: 1}):
        scheduler = GradientAccumulationScheduler(factors)
        trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[scheduler], default_root_dir=tmp_path)
        said = "accumulate_grad_batches=[23] was set; "
        for strategy, name in ((PsStrategy(), "ps"), (SarStrategy(), "sar")):
            with pytest.raises(ConfigError, match=f"{said}strategy={name} takes"):
                strategy.check_start(trainer, module, None)
