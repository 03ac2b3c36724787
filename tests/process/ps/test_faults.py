"""Workers and parameter servers that are killed while a run trains, and runs that go on in the middle of an epoch."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from forked import Program, enough, gtrain, lasting
from helpers import REPO, alive, descendants, has_logged, logs, ok, show, summary, until

ASSETS = REPO / "tests" / "assets"
SMALL = (
    "strategy=ps",
    "data=planted_sparse",
    "data.num_rows=600",
    "data.num_features=200",
    "data.features_per_row=6",
    "data.batch_size=60",
    "model=sparse",
    "model.hidden_channels=8",
    "model.dropout=0.3",
    "model.sparse_optimizer._target_=gtrain.nn.RowwiseAdagrad",
    "trainer.precision=64-true",
    "trainer.enable_progress_bar=false",
)
KILLS = 20
AIMED = {
    "on_validation_start 3": "rank-0 kills parameter-0",
    "on_validation_batch_end 5": "rank-1 kills parameter-1 rank-1",
    "apart 7": "rank-0 kills parameter-0 rank-1 rank-0",
    "on_save_checkpoint 9": "rank-0 kills rank-1 rank-0",
    "on_validation_end 11": "rank-1 kills rank-0 parameter-0 rank-1",
}
"""Moments that chance meets seldom; see ``assets/ps_killer.py``."""
STATEFUL = '''
import os, signal
from pathlib import Path
import lightning.pytorch as pl

class Stateful(pl.Callback):
    """Has state in hooks of checkpoints, and replaces parameters' memory; may kill rank 1 once, in an epoch."""

    def __init__(self, folder, epoch):
        self.folder, self.epoch, self.epochs = Path(folder), epoch, 0
        self.folder.mkdir(exist_ok=True)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["epochs_seen"] = self.epochs

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.epochs = checkpoint["epochs_seen"]

    def on_train_batch_start(self, trainer, module, batch, index):
        if (trainer.global_rank, trainer.current_epoch, index) == (1, self.epoch, 1):
            killed = self.folder / "killed"
            if not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer, module, *_):
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()

    def on_train_epoch_end(self, trainer, module):
        self.epochs += 1

    def on_train_end(self, trainer, module):
        (self.folder / f"rank-{trainer.global_rank}").write_text(f"{self.epochs} epochs")
'''


def processes(root: int) -> dict[str, int]:
    """Process ids of a job's workers and servers by the names of their logs, which they hold open."""
    found: dict[str, int] = {}
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                name = re.search(r"logs/((?:rank|parameter|store)-\d+)\.log$", os.readlink(f"/proc/{pid}/fd/{number}"))
                if name:
                    found.setdefault(name[1], pid)
    return found


def compare_with_an_undisturbed_run(folder: Path, *arguments: str) -> None:
    """Hold that a disturbed run has the history and metrics of one of as many epochs."""
    disturbed = summary(folder / "run")
    epochs = f"trainer.max_epochs={len(disturbed['history'])}"
    ok(gtrain(*arguments, epochs, "hydra.run.dir=undisturbed", cwd=folder))
    expected = summary(folder / "undisturbed")
    assert disturbed["history"] == expected["history"]
    assert disturbed["metrics"] == expected["metrics"]


@pytest.mark.slow
def test_a_run_of_which_twenty_processes_are_killed_is_like_an_undisturbed_one(tmp_path: Path) -> None:
    """Workers and servers, at moments and in an order that a seed decides, and at those that matter most besides."""
    run, aimed, chance, killed = tmp_path / "run", tmp_path / "aimed", random.Random(7), set[int]()
    plan = ",".join(f"{moment}:{action}" for moment, action in AIMED.items())
    killer = f"+callbacks.killer={{_target_:ps_killer.Killer,folder:{aimed},run:{run},plan:{{{plan}}}}}"
    job = lasting(tmp_path, *SMALL, killer, f"strategy.max_restarts={KILLS}")
    try:
        until(lambda: len(processes(job.pid)) == 5, tmp_path)
        until(lambda: has_logged(run), tmp_path)
        while len(killed) < KILLS and alive(job.pid):
            time.sleep(chance.uniform(0.02, 1.0))  # the moment is what varies; nothing is waited for
            victim = processes(job.pid).get(chance.choice(["parameter-0", "parameter-1", "rank-0", "rank-1"]))
            if victim is not None and victim not in killed:
                with contextlib.suppress(ProcessLookupError):  # the killer in the run was quicker
                    os.kill(victim, signal.SIGKILL)
                    killed.add(victim)
        until(lambda: all((aimed / moment).exists() for moment in AIMED) or not alive(job.pid), tmp_path)
        enough(tmp_path)
        done = job.end()
    finally:
        job.kill()
    assert done.returncode == 0, show(done) + logs(tmp_path)
    assert len(killed) == KILLS, show(done)
    killed |= set(map(int, (aimed / "killed").read_text().split()))
    assert done.stderr.count("restarting it") == len(killed), show(done)
    compare_with_an_undisturbed_run(tmp_path, *SMALL)


@pytest.mark.slow
def test_a_worker_that_is_restarted_has_all_that_it_had(tmp_path: Path) -> None:
    """In an epoch behind one that was cut, after which rows of further batches had been sent; with a checkpoint's seed
    of dropout, which is not that of the run; with state in hooks, and in parameters whose memory each step replaces."""
    (tmp_path / "mine.py").write_text(STATEFUL)

    def train(run: str, epochs: int, kill: int, *more: str) -> None:
        callback = f"+callbacks.state={{_target_:mine.Stateful,folder:{tmp_path}/of-{run},epoch:{kill}}}"
        cut = ("trainer.limit_train_batches=3", f"trainer.max_epochs={epochs}", "data.seed=1")
        ok(gtrain(*SMALL, callback, *cut, *more, f"hydra.run.dir={run}", cwd=tmp_path))

    train("first", 1, -1, "seed=1")
    resumed = ("seed=2", "ckpt_path=first/checkpoints/last.ckpt")
    train("run", 4, 2, *resumed)
    train("undisturbed", 4, -1, *resumed)
    assert (tmp_path / "of-run" / "killed").exists()
    assert summary(tmp_path / "run")["history"] == summary(tmp_path / "undisturbed")["history"]
    for rank in ("rank-0", "rank-1"):
        assert (tmp_path / "of-run" / rank).read_text() == "4 epochs"


@pytest.mark.slow
def test_every_process_of_a_job_has_a_log_and_killed_servers_have_what_they_had(tmp_path: Path) -> None:
    """What servers survive by is memory of the command's own process: there is nobody else whom to kill."""
    command = (*SMALL, "trainer.limit_test_batches=0")
    job = lasting(tmp_path, *command)
    try:
        until(lambda: has_logged(tmp_path / "run"), tmp_path)
        logged = processes(job.pid)
        assert set(descendants(job.pid)) == set(logged.values()) and len(logged) == 5
        for name in ("parameter-0", "parameter-1"):
            os.kill(logged[name], signal.SIGKILL)
        until(lambda: job.errors().count("restarting it") == 2, tmp_path)
        enough(tmp_path)
        done = ok(job.end())
    finally:
        job.kill()
    for number in range(2):
        assert f"parameter {number} of 2 (machine {number}) was killed by SIGKILL; restarting it" in done.stderr
    compare_with_an_undisturbed_run(tmp_path, *command)


@pytest.mark.parametrize(
    ("setting", "victim", "name"),
    [
        ("strategy.durability=none", "parameter-1", "parameter 1 of 2"),
        ("strategy.max_restarts=0", "rank-0", "rank 0 of 2"),
        ("strategy.rest=allreduce", "rank-1", "rank 1 of 2"),
    ],
)
def test_where_nothing_is_kept_a_killed_process_ends_the_job(
    setting: str, victim: str, name: str, tmp_path: Path
) -> None:
    job = Program("-m", "gtrain", *SMALL, setting, "trainer.max_epochs=100000", "hydra.run.dir=run", cwd=tmp_path)
    try:
        until(lambda: has_logged(tmp_path / "run"), tmp_path)
        os.kill(processes(job.pid)[victim], signal.SIGKILL)
        done = job.end()
    finally:
        job.kill()
    assert done.returncode != 0
    assert name in done.stderr and "was killed by SIGKILL" in done.stderr


def test_an_exception_of_a_worker_ends_the_job_with_its_message(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import lightning.pytorch as pl\n"
        "class Wrong(pl.Callback):\n"
        "    def on_train_epoch_start(self, trainer, module):\n"
        "        if (trainer.global_rank, trainer.current_epoch) == (1, 1):\n"
        "            raise ValueError('a tensor of another shape')\n"
    )
    done = gtrain(*SMALL, "+callbacks.wrong._target_=mine.Wrong", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode != 0 and "restarting" not in done.stderr
    assert "rank 1 of 2 (machine 1) failed with ValueError: a tensor of another shape" in done.stderr
    assert "Traceback" not in done.stderr  # which is in the log
    assert "raise ValueError('a tensor of another shape')" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    saving = (
        "callbacks.checkpoint.monitor=null",
        "+callbacks.checkpoint.every_n_train_steps=8",
        "+callbacks.checkpoint.save_top_k=-1",
        "+callbacks.checkpoint.auto_insert_metric_name=false",
        "callbacks.checkpoint.save_on_train_epoch_end=false",
        'callbacks.checkpoint.filename="step{step}"',
    )
    ok(gtrain(*SMALL, *saving, "trainer.max_epochs=3", "hydra.run.dir=whole", cwd=tmp_path))
    where = "ckpt_path=whole/checkpoints/step8.ckpt"  # 6 steps are an epoch
    ok(gtrain(*SMALL, where, "trainer.max_epochs=3", "hydra.run.dir=rest", cwd=tmp_path))
    assert summary(tmp_path / "rest")["history"] == summary(tmp_path / "whole")["history"][1:]


@pytest.mark.slow
def test_a_job_of_which_everything_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Servers that write down what they do; a record that was cut off at the end of a log counts for nothing."""
    command = (*SMALL, "strategy.durability=disk")
    job = lasting(tmp_path, *command)
    try:
        until(lambda: has_logged(tmp_path / "run"), tmp_path)
    finally:
        job.kill()
        job.end()
    folders = sorted((tmp_path / "run").glob("parameter-*.disk"))
    assert len(folders) == 2
    with open(next(folders[0].glob("log-*")), "ab") as log:
        log.write(b"\x40" + bytes(40))
    other = gtrain(*command, "model.hidden_channels=4", "hydra.run.dir=run", cwd=tmp_path)
    assert other.returncode != 0 and "of a job that did not end, with another model" in other.stderr
    enough(tmp_path)
    ok(lasting(tmp_path, *command).end())
    assert "resumes at step" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    compare_with_an_undisturbed_run(tmp_path, *command)
    assert not any(folder.exists() for folder in folders)


@pytest.mark.slow
def test_workers_wait_for_a_server_that_stands_still_and_pile_nothing_up(tmp_path: Path) -> None:
    job = lasting(tmp_path, *SMALL, "trainer.limit_test_batches=0", "callbacks=none")
    log = tmp_path / "run" / "logs" / "rank-1.log"
    try:
        until(lambda: has_logged(tmp_path / "run"), tmp_path)
        found = processes(job.pid)
        os.kill(found["parameter-0"], signal.SIGSTOP)
        before = resident(found["rank-1"])
        until(lambda: "from parameter 0 for 3 s" in log.read_text(), tmp_path)
        assert resident(found["rank-1"]) - before < 8 << 20
        os.kill(found["parameter-0"], signal.SIGCONT)
        enough(tmp_path)
        done = ok(job.end())
    finally:
        job.kill()
    assert "restarting" not in done.stderr


@pytest.mark.slow
def test_whoever_stands_still_is_named_on_the_terminal(tmp_path: Path) -> None:
    """Rank 0 included, which writes to the terminal itself; losses are those of an undisturbed run."""
    job = lasting(tmp_path, *SMALL)
    try:
        until(lambda: has_logged(tmp_path / "run"), tmp_path)
        for process, name in (("parameter-1", r"parameter 1 \(machine 1\)"), ("rank-0", r"rank 0 \(machine 0\)")):
            victim = processes(job.pid)[process]
            os.kill(victim, signal.SIGSTOP)
            until(lambda name=name: re.search(rf"gtrain: waiting for {name}, \d+ s", job.errors()), tmp_path)
            os.kill(victim, signal.SIGCONT)
        enough(tmp_path)
        ok(job.end())
    finally:
        job.kill()
    compare_with_an_undisturbed_run(tmp_path, *SMALL)


@pytest.mark.slow
def test_who_stays_silent_is_killed_and_restarted_and_nobody_else(tmp_path: Path) -> None:
    """A server and rank 0, by the agent that has started them; losses are those of an undisturbed run."""
    job = lasting(tmp_path, *SMALL, "strategy.timeout_seconds=15")
    try:
        until(lambda: has_logged(tmp_path / "run"), tmp_path)
        for process, name in (("parameter-1", "parameter 1"), ("rank-0", "rank 0")):
            os.kill(processes(job.pid)[process], signal.SIGSTOP)
            killed = f"{name} of 2 (machine {name[-1]}) sent no heartbeat for 15 s and was killed; restarting it (1/"
            until(lambda killed=killed: killed in job.errors(), tmp_path)
        enough(tmp_path)
        done = ok(job.end())
    finally:
        job.kill()
    assert done.stderr.count("restarting it") == 2
    compare_with_an_undisturbed_run(tmp_path, *SMALL)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_killed_keeper_under_torchrun_ends_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    """Rank 0 names it; rank 1, which waits for servers that are gone, does not wait until torchrun kills it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "gtrain")
    more = ("trainer.max_epochs=100000", "hydra.run.dir=run")
    job = Program(*torchrun, *SMALL, *more, cwd=tmp_path, env={"TMPDIR": str(temporary)})
    try:
        until(lambda: has_logged(tmp_path / "run"), tmp_path)
        family = descendants(job.pid)
        server = processes(job.pid)["parameter-0"]
        keeper = parent(server)
        assert not list(temporary.glob("gtrain-*"))
        os.kill(keeper, signal.SIGKILL)
        done = job.end()
    finally:
        job.kill()
    assert done.returncode != 0
    assert f"the servers of machine 0 (process {keeper}) was killed by SIGKILL, and its servers with it" in done.stderr
    assert not re.search(r"exitcode +: -9", done.stderr)
    until(lambda: not any(map(alive, family)), tmp_path)
    assert not list(temporary.glob("gtrain-*"))


@pytest.mark.slow
def test_a_stopped_keeper_under_torchrun_is_named_and_changes_nothing(tmp_path: Path) -> None:
    """Its servers go on; at the end, when it does not stop them, it is killed with them."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "gtrain")
    job = lasting(tmp_path, *SMALL, program=torchrun)
    try:
        until(lambda: has_logged(tmp_path / "run"), tmp_path)
        keeper = parent(processes(job.pid)["parameter-0"])
        os.kill(keeper, signal.SIGSTOP)
        name = f"gtrain: the keeper of the servers of machine 0 (process {keeper})"
        until(lambda: f"{name} was stopped by SIGSTOP" in job.errors(), tmp_path)
        enough(tmp_path)
        done = ok(job.end())
    finally:
        job.kill()
    assert f"{name} did not stop them in 12 s and is killed" in done.stderr
    assert not alive(keeper)
    compare_with_an_undisturbed_run(tmp_path, *SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("is_local", [True, False], ids=["local", "manual"])
def test_a_stopped_process_of_the_store_delays_only_ranks_that_need_it(is_local: bool, tmp_path: Path) -> None:
    """Ranks that train do not; a restarted one does if its command was started by hand, and names it."""
    run = tmp_path / "run"
    by_hand = ("cluster=manual", "cluster.rank=0", f"cluster.rendezvous=file://{tmp_path}/meet", "trainer.num_nodes=1")
    job = lasting(tmp_path, *SMALL, *(() if is_local else (*by_hand, "trainer.devices=2")))
    try:
        until(lambda: has_logged(run), tmp_path)
        victims = processes(job.pid)
        os.kill(victims["store-0"], signal.SIGSTOP)
        os.kill(victims["rank-1"], signal.SIGKILL)
        until(lambda: "restarting it (1/" in job.errors(), tmp_path)
        if not is_local:
            until(lambda: re.search(r"gtrain: waiting for store 0 \(machine 0\), 1\d s", job.errors()), tmp_path)
            os.kill(victims["store-0"], signal.SIGCONT)
        size = (run / "metrics.csv").stat().st_size
        until(lambda: (run / "metrics.csv").stat().st_size > size + 1000, tmp_path)
        enough(tmp_path)
        done = ok(job.end())
    finally:
        job.kill()
    assert ("waiting for" in done.stderr) != is_local
    assert ("store 0 did not end in 2 s and is killed" in done.stderr) == is_local
    assert not alive(victims["store-0"])
    compare_with_an_undisturbed_run(tmp_path, *SMALL)


def parent(pid: int) -> int:
    """Process id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def resident(pid: int) -> int:
    """Resident memory of a process, bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
