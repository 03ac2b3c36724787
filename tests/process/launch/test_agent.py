"""The agent: what it reports, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from helpers import LIMIT, REPO, alive, rest_exhaustive, until

THREADED = REPO / "tests" / "assets" / "threaded_program.py"
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from gtrain import run_local
from gtrain.errors import ConfigError, GtrainError, PeerLostError
from gtrain.launch import slot

def task():
    rank = slot.current().slot.rank
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    print("output of rank", rank)
    {body}

try:
    result = run_local(task, num_nodes=2, devices=2, log_dir="logs")
    print("RESULT", json.dumps(result))
except GtrainError as error:
    print("ERROR", type(error).__name__, str(error))
    sys.exit(3)
"""
EVERYONE_WAITS = "while True: signal.pause()"  # until it is killed


def write(folder: Path, body: str) -> Path:
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("{body}", body.replace("\n", "\n    ")))
    return program


def run(folder: Path, body: str, timeout: float = LIMIT) -> subprocess.CompletedProcess[str]:
    """Run a job of four ranks to its end."""
    return forked.python(str(write(folder, body)), cwd=folder, timeout=timeout)


def pids(folder: Path, ranks: int = 4) -> list[int]:
    """The ranks' processes, once all have started."""
    files = [folder / f"pid-{rank}" for rank in range(ranks)]
    until(lambda: all(f.exists() and f.read_text() for f in files), folder)
    return [int(f.read_text()) for f in files]


def test_every_rank_runs_and_rank_0_answers(tmp_path: Path) -> None:
    done = run(tmp_path, "return {'rank': rank, 'world': slot.current().world_size}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.split("RESULT ")[1]) == {"rank": 0, "world": 4}
    assert "output of rank 0" in done.stdout
    assert "output of rank 1" not in done.stdout  # only its log has it
    for rank in range(4):
        assert f"output of rank {rank}" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()


def test_ranks_know_their_machine_and_place(tmp_path: Path) -> None:
    run(tmp_path, "s = slot.current().slot\nPath(f'slot-{rank}').write_text(f'{s.node} {s.local}')")
    assert [(tmp_path / f"slot-{r}").read_text() for r in range(4)] == ["0 0", "0 1", "1 0", "1 1"]


def test_an_exception_is_named_with_its_rank_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    done = run(tmp_path, f"if rank == 2: raise ZeroDivisionError('by nought')\n{EVERYONE_WAITS}")
    assert done.returncode == 3
    assert "RankFailedError rank 2 of 4 (machine 1) failed with ZeroDivisionError: by nought" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "ZeroDivisionError: by nought" in (tmp_path / "logs" / "rank-2.log").read_text()


def test_a_users_mistake_is_passed_on_as_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, f"if rank == 1: raise ConfigError('x=1 was set.', hint='unset it')\n{EVERYONE_WAITS}")
    assert "ERROR GtrainError x=1 was set.\nHINT: unset it" in done.stdout


def test_the_echo_of_a_failure_is_not_blamed(tmp_path: Path) -> None:
    body = f"""if rank == 3:
    until = Path('echoed')
    while not until.exists(): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    slot.report_failure(PeerLostError('connection closed by peer'))
    Path('echoed').touch()
{EVERYONE_WAITS}"""
    done = run(tmp_path, body)
    assert "rank 3 of 4 (machine 1) was killed by SIGKILL" in done.stdout


def test_the_first_of_several_failures_is_named(tmp_path: Path) -> None:
    body = f"""if rank == 2:
    slot.report_failure(ValueError('first'))
    Path('failed').touch()
if rank == 0:
    while not Path('failed').exists(): time.sleep(0.01)
    raise ValueError('second')
{EVERYONE_WAITS}"""
    assert "rank 2 of 4 (machine 1) failed with ValueError: first" in run(tmp_path, body).stdout


@pytest.mark.parametrize(("ending", "said"), [("os._exit(5)", "exit code 5"), ("os._exit(0)", "exit code 0")])
def test_ending_early_is_a_failure_whatever_the_exit_code(tmp_path: Path, ending: str, said: str) -> None:
    done = run(tmp_path, f"if rank == 1: {ending}\n{EVERYONE_WAITS}")
    assert done.returncode == 3
    assert f"rank 1 of 4 (machine 0) ended with {said} before its task was done" in done.stdout


def test_a_killed_rank_ends_the_job_and_every_other_rank(tmp_path: Path) -> None:
    job = forked.Program(str(write(tmp_path, EVERYONE_WAITS)), cwd=tmp_path)
    ranks = pids(tmp_path)
    os.kill(ranks[3], signal.SIGKILL)
    assert "rank 3 of 4 (machine 1) was killed by SIGKILL" in job.end().stdout
    assert not any(map(alive, ranks))


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, None)]
)
def test_no_rank_outlives_the_agent(tmp_path: Path, number: signal.Signals, exit_code: int | None) -> None:
    job = forked.Program(str(write(tmp_path, EVERYONE_WAITS)), cwd=tmp_path)
    ranks = pids(tmp_path)
    os.kill(job.pid, number)
    done = job.end()
    until(lambda: not any(map(alive, ranks)), tmp_path)
    if exit_code is not None:
        assert done.returncode == exit_code
    else:
        assert "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize(
    ("number", "message"),
    [("SIGINT", "KeyboardInterrupt"), ("SIGTERM", "ended by SIGTERM"), ("SIGHUP", "ended by SIGHUP")],
)
def test_a_signal_that_comes_with_a_fork_is_not_lost(number: str, message: str, tmp_path: Path) -> None:
    """Python ignores what is raised in functions that it calls after a fork."""
    program = write(tmp_path, EVERYONE_WAITS)
    sends = f"os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.{number}))\ntry:\n    result"
    program.write_text(program.read_text().replace("try:\n    result", sends))
    done = forked.python(str(program), cwd=tmp_path)
    assert message in done.stderr and "Exception ignored" not in done.stderr


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    body = f"""signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 1:
    child = os.fork()
    if child == 0:
        {EVERYONE_WAITS}
    Path('grandchild').write_text(str(child))
if rank == 0:
    while not Path('grandchild').exists(): time.sleep(0.01)
    raise ValueError('enough')
{EVERYONE_WAITS}"""
    done = run(tmp_path, body)
    assert re.search(r"rank 0 .* ValueError: enough", done.stdout)
    until(lambda: not alive(int((tmp_path / "grandchild").read_text())), tmp_path)


@pytest.mark.slow
def test_ranks_of_a_program_with_threads_find_what_forks_would(tmp_path: Path) -> None:
    """A fork of it would wait without end for threads of OpenMP's that it does not have."""
    done = forked.python(str(THREADED), "everything", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout.split("CHECKS ")[1])
    assert len(checks) == 8 and all(checks.values()), checks
    assert "logged by rank 0" in done.stdout and "logged by rank 1" in (tmp_path / "logs" / "rank-1.log").read_text()
    assert "told to be silent" not in done.stderr


@pytest.mark.slow
def test_a_program_with_threads_gets_its_ranks_errors(tmp_path: Path) -> None:
    said = forked.python(str(THREADED), "errors", cwd=tmp_path).stdout
    assert "RAISED RankFailedError rank " in said and "failed with Mistake: own type" in said
    assert "cannot copy the variable lock (lock) to the ranks: TypeError" in said
    assert "because it has " in said


@pytest.mark.parametrize("number", rest_exhaustive([signal.SIGKILL, signal.SIGINT, signal.SIGTERM], signal.SIGKILL))
@pytest.mark.slow
def test_no_rank_outlives_a_program_with_threads(tmp_path: Path, number: signal.Signals) -> None:
    job = forked.Program(str(THREADED), "wait", cwd=tmp_path)
    ranks = pids(tmp_path, 2)
    agent = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    assert agent != job.pid
    os.kill(job.pid, number)
    done = job.end()
    until(lambda: not any(map(alive, [agent, *ranks])), tmp_path)
    assert done.returncode == {signal.SIGKILL: -9, signal.SIGINT: -2, signal.SIGTERM: 143}[number]


def test_importing_gtrain_starts_no_process_and_no_thread(tmp_path: Path) -> None:
    code = (
        "import os, threading, gtrain\n"
        "gtrain.run_local\n"
        "print(threading.active_count(), open(f'/proc/self/task/{os.getpid()}/children').read().split())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path)
    assert done.stdout == "1 []\n", done.stderr


@pytest.mark.slow
def test_what_the_agent_imports_starts_no_thread_pool_and_ranks_share_what_numba_loads(tmp_path: Path) -> None:
    """A pool does not survive a fork: OpenMP kills the child that inherits one. One rank may need no kernel at all."""
    code = (
        "import sys\n"
        "from gtrain import run_local\n"
        "def loaded(): return 'numba.np.arrayobj' in sys.modules\n"
        "print(*(run_local(loaded, num_nodes=ranks) for ranks in (1, 2)))\n"
        "parallel = sys.modules.get('numba.np.ufunc.parallel')\n"
        "light = {f'gtrain.kernels{m}' for m in ('', '.available', '.splitmix', '.threads')}\n"
        "kernels = {m for m in sys.modules if 'kernels' in m} - light\n"
        "print(bool(parallel and parallel._is_initialized), sorted(kernels))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path)
    assert done.stdout.split("\n")[:2] == ["False True", "False []"], done.stderr
