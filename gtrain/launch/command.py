"""What the command does with a composed configuration: the ways to start a job, or one process of it.

Light: torch is imported in ranks and servers alone.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import select
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, open_dict

from gtrain import backends, config, errors, keys, runs
from gtrain.errors import ConfigError, GtrainError, PeerLostError, RankFailedError
from gtrain.launch import cluster, keeper, meeting
from gtrain.launch.agent import preload, run, run_local
from gtrain.launch.children import PRELOAD, die_with_parent
from gtrain.launch.job import Job, posts_of
from gtrain.launch.logs import capture, log_path
from gtrain.launch.meeting import Meeting
from gtrain.launch.roles import RolePlan, check_shape, counts_of
from gtrain.launch.shipping import read_result, result_file
from gtrain.launch.slot import Roster, set_roster
from gtrain.launch.sockets import Listener, listen_here

TASK = "gtrain.task:run"
PREFLIGHT = "gtrain.preflight"
_PREFLIGHT_SECONDS = 120.0
TASK_BY_HAND = "gtrain.strategy.by_hand:run"
ranks_meet = False
"""Whether this process is a rank that meets the others: from then on, each rank prints errors of its own."""


def launch(cfg: DictConfig, choices: dict[str, str], given: list[str]) -> Any:
    """Do what the configuration says.

    Args:
        cfg: the composed configuration.
        choices: names of the chosen ``strategy``, ``data`` and ``model``.
        given: the overrides of the command line.

    Returns:
        What rank 0's task returned, if it ran here.
    """
    launcher = cluster.resolve(cfg.cluster.kind)
    if cfg.verb == "key":
        return _make_key(cfg)
    if cfg.verb == "serve":
        config.validate(cfg)
        return _serve(cfg)
    if launcher == cluster.MANUAL:
        config.validate(copy.deepcopy(cfg))  # rank 0's folder will be that of the run, and all else follows it
        return _by_hand(cfg, choices, given)
    _check_hand_keys(cfg)
    if launcher == cluster.LOCAL:
        config.validate(cfg)
        return _here(cfg, choices, given)
    return _as_rank(cfg, choices, launcher, given)


def _preflight(cfg: DictConfig, choices: dict[str, str], given: list[str]) -> None:
    """Refuse what needs no data, in a short-lived process: it may start threads and use CUDA, unlike the agent.

    Raises:
        GtrainError: as it was raised there.
    """
    preload()
    sys.stdout.flush()
    sys.stderr.flush()
    reports, to_report = os.pipe()
    pid = os.fork()
    if pid == 0:
        _report_refusal(to_report, cfg, choices, given)
    os.close(to_report)
    content = b""
    try:
        with open(reports, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], _PREFLIGHT_SECONDS)[0] and (some := pipe.read(1 << 16)):
                content += some
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # where it hangs; else it has ended
        os.waitpid(pid, 0)
    if content:
        refusal = json.loads(content)
        raise getattr(errors, refusal["type"], GtrainError)(refusal["message"], hint=refusal["hint"])


def _report_refusal(to_report: int, cfg: DictConfig, choices: dict[str, str], given: list[str]) -> NoReturn:
    """The life of that process. Whatever else goes wrong goes wrong in a rank too, which has a log for it."""
    try:
        die_with_parent(os.getppid())
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        sys.modules[PRELOAD].keep_templates_in_memory()
        typed = [override.lstrip("+~").partition("=")[0] for override in given]
        importlib.import_module(PREFLIGHT).check(config.plain(cfg), choices, typed)
    except GtrainError as error:
        refusal = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        with open(to_report, "wb", closefd=False) as pipe:
            pipe.write(json.dumps(refusal).encode())
    finally:
        os._exit(0)


@contextlib.contextmanager
def _hinting_at_resume(cfg: DictConfig) -> Iterator[None]:
    """After a kill or a signal, say how to resume; machine 0 knows the run's folder."""
    trains = cfg.verb == "train" and cfg.cluster.rank in (None, 0)
    try:
        yield
    except (RankFailedError, PeerLostError) as error:
        if trains:
            error.add_hint(runs.how_to_resume(Path(cfg.paths.run)))
        raise
    except SystemExit as error:
        by_lightning = type(error).__name__ == "SIGTERMException"  # has no code, and Lightning isn't imported here
        code = 128 + signal.SIGTERM if by_lightning else error.code
        if trains and isinstance(code, int) and code > 128:
            print(f"gtrain: {runs.how_to_resume(Path(cfg.paths.run))}", file=sys.stderr, flush=True)
        sys.exit(code)
    except KeyboardInterrupt as error:
        if trains:
            error.add_note(runs.how_to_resume(Path(cfg.paths.run)))
        raise


# ---------------------------------------------------------------------------------------------------- by the agent


def _here(cfg: DictConfig, choices: dict[str, str], given: list[str]) -> Any:
    """All machines are simulated on this one."""
    nodes, devices = (1, 1) if cfg.verb == "partition" else (cfg.trainer.num_nodes, cfg.trainer.devices)
    plans = () if cfg.verb == "partition" else backends.get(cfg.strategy.name).plan(cfg)
    _preflight(cfg, choices, given)
    with _hinting_at_resume(cfg):
        return run_local(
            TASK,
            cfg,
            choices,
            num_nodes=nodes,
            devices=devices,
            log_dir=_logs(cfg),
            roles=plans,
            config=cfg,
            key_file=_key_file(cfg),
        )


def _by_hand(cfg: DictConfig, choices: dict[str, str], given: list[str]) -> Any:
    """This machine's share of a job whose command is started by hand on each of its machines."""
    place_of_meeting, nodes, devices = meeting.parse(cfg.cluster.rendezvous), cfg.trainer.num_nodes, cfg.trainer.devices
    if cfg.cluster.rank is None:
        raise ConfigError(
            "cluster=manual was set, and cluster.rank is not.",
            hint=f"number the machines: cluster.rank=0 on one, up to {nodes - 1} (trainer.num_nodes={nodes}).",
        )
    check_shape(nodes, devices, cfg.cluster.rank)
    plans = backends.get(cfg.strategy.name).plan(cfg)
    job = Job(nodes, devices, _logs(cfg), cfg.cluster.rank, roles=plans, config=cfg, key_file=_key_file(cfg))
    _check_secure(place_of_meeting, job.key_file)
    settled = copy.deepcopy(cfg)
    config.validate(settled)
    _preflight(settled, choices, given)
    if job.machine == 0:
        with meeting.held(place_of_meeting, job.key_file is not None) as place:
            return _run_at(job, place, cfg, choices)
    return _run_at(
        job, meeting.find(place_of_meeting, cfg.cluster.timeout_seconds, job.key_file is not None), cfg, choices
    )


def _run_at(job: Job, place: meeting.Place, cfg: DictConfig, choices: dict[str, str]) -> Any:
    job.host, job.port, job.route, job.store_address = place.host, place.port, place.route, place.address
    with contextlib.ExitStack() as at_the_end:
        if place.socket is not None:
            inside = listen_here()  # what this machine's processes connect to, and all that have no keys
            at_the_end.callback(inside.close)
            job.store, job.store_address = (inside, Listener(place.socket, place.address)), inside.address
        job.result = at_the_end.enter_context(result_file())
        at_the_end.enter_context(_hinting_at_resume(cfg))
        run(job, lambda: posts_of(job, TASK_BY_HAND, (cfg, choices)))
        return read_result(job.result)


# ---------------------------------------------------------------------------------------------------- by others


def _as_rank(cfg: DictConfig, choices: dict[str, str], launcher: str, given: list[str]) -> Any:
    """This process is a rank already; local rank 0 of each machine has its machine's servers started beside it."""
    place = cluster.external_place(launcher)
    _take_world(cfg, launcher, place, given)
    config.validate(copy.deepcopy(cfg))  # the run's folder is not known yet, and all else must be right before a fork
    plans = () if cfg.verb == "partition" else backends.get(cfg.strategy.name).plan(cfg)
    if any(plan.by_hand for plan in plans):
        raise ConfigError(
            f"cluster.standalone={list(cfg.cluster.standalone)} was set; under {launcher} servers find no rendezvous.",
            hint="leave it empty: local rank 0 of each machine starts its machine's servers.",
        )
    key_file = _key_file(cfg)
    if key_file is None and place.machines > 1:
        raise ConfigError(
            f"{launcher} started ranks on {place.machines} machines, and cluster.key_file is not set.",
            hint="make keys with gtrain key cluster.key_file=job.key in a folder that all machines share; or, where "
            "nobody else can reach the network, set cluster.isolated=true.",
        )
    set_roster(Roster(counts_of(plans), {}, key_file))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun waits for its ranks; killed, it would leave them behind
        die_with_parent(os.getppid())
    with keeper.beside(place, plans, cfg) as servers:
        preload()
        sys.modules[PRELOAD].keep_templates_in_memory()
        settled = copy.deepcopy(cfg)
        config.validate(settled)
        _preflight(settled, choices, given)
        from gtrain import task
        from gtrain.launch.environment import find_environment

        global ranks_meet
        ranks_meet = True
        cfg.paths.run = task.shared_run_dir(cfg.paths.run)
        task.check_same_settings(cfg, place.rank)
        config.validate(cfg)
        capture(log_path(_logs(cfg), f"rank {place.rank}"), terminal=True)
        from gtrain.strategy.rendezvous import store_address

        environment = find_environment()
        servers.go(_logs(cfg), key_file, environment.main_address, store_address(environment))
        with _hinting_at_resume(cfg) if place.rank == 0 else contextlib.nullcontext():
            return task.run(cfg, choices)


def _take_world(cfg: DictConfig, launcher: str, place: cluster.External, given: list[str]) -> None:
    """Take the number of ranks from the launcher that started them, unless the command names another.

    Raises:
        ConfigError: the command and the launcher contradict each other.
    """
    nodes, devices = cfg.trainer.num_nodes, cfg.trainer.devices
    if nodes * devices == place.size:
        return
    if any(override.startswith(("trainer.num_nodes=", "trainer.devices=")) for override in given):
        raise ConfigError(
            f"trainer.num_nodes {nodes} * trainer.devices {devices} = {nodes * devices} ranks were set, "
            f"but {launcher} started {place.size}.",
            hint=f"set numbers whose product is {place.size}, or neither.",
        )
    even = place.machines * place.local_size == place.size
    with open_dict(cfg):
        cfg.trainer.num_nodes = place.machines if even else place.size
        cfg.trainer.devices = place.local_size if even else 1


# ---------------------------------------------------------------------------------------------------- servers, keys


def _serve(cfg: DictConfig) -> None:
    """One server, in this process, until it is told to end or the job is over."""
    backend = backends.get(cfg.strategy.name)
    if cfg.role is None:
        raise ConfigError(
            "gtrain serve was given, and role is not set.",
            hint=f"the servers of strategy={cfg.strategy.name} are {', '.join(backend.server_roles) or 'none'}.",
        )
    role = backends.check_role(cfg.strategy.name, backend, cfg.role)
    plan = next((plan for plan in backend.plan(cfg) if plan.name == cfg.role), RolePlan(cfg.role, role.target))
    if cfg.cluster.rank is not None and cfg.cluster.rank >= plan.count:
        raise ConfigError(
            f"cluster.rank={cfg.cluster.rank} was set; strategy={cfg.strategy.name} has {plan.count} servers of "
            f"role {cfg.role} here.",
            hint=f"their ranks are 0 to {plan.count - 1}." if plan.count else "set the number of servers above 0.",
        )
    place_of_meeting, key_file = meeting.parse(cfg.cluster.rendezvous), _key_file(cfg)
    _check_secure(place_of_meeting, key_file)
    place = meeting.find(place_of_meeting, cfg.cluster.timeout_seconds, key_file is not None)
    from gtrain.strategy import by_hand

    by_hand.serve(cfg, plan, place, key_file)


def _make_key(cfg: DictConfig) -> None:
    name = cfg.cluster.key_file
    if name is None:
        raise ConfigError("gtrain key was given, and cluster.key_file is not set.", hint="set cluster.key_file=FILE.")
    path = Path(name).absolute()
    if path.exists():
        raise ConfigError(f"cluster.key_file={name} is there already.", hint="delete it first to have other keys.")
    _create_key(path)
    print(f"{path} holds the keys of a job. Keep it secret; every machine of the job needs a copy.")


def _create_key(path: Path) -> None:
    from gtrain.wire import Security  # not before it is needed: it loads ZeroMQ

    path.parent.mkdir(parents=True, exist_ok=True)
    Security.create().save(path)


def _key_file(cfg: DictConfig) -> str | None:
    """``cluster.key_file``, absolute, or what stands for it with ``cluster.isolated``.

    Raises:
        ConfigError: the file is not there, or others may read it.
    """
    if cfg.cluster.isolated:
        print(
            "gtrain: cluster.isolated=true: no key protects this job; whoever reaches its network can take part in it"
        )
        return keys.ISOLATED
    if cfg.cluster.key_file is None:
        return None
    path = Path(cfg.cluster.key_file).absolute()
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"cluster.key_file={cfg.cluster.key_file} was set; it is not a regular file.",
            hint="make a key file with gtrain key cluster.key_file=job.key.",
        )
    if not path.is_file():
        raise ConfigError(
            f"cluster.key_file={cfg.cluster.key_file} was set; there is no such file.",
            hint=f"make it once with gtrain key cluster.key_file={cfg.cluster.key_file}, and copy it to every machine.",
        )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"cluster.key_file={cfg.cluster.key_file} has mode {mode:04o}: other users may read or change it.",
            hint=f"chmod 600 {cfg.cluster.key_file}; make new keys if others may have read them.",
        )
    return str(path)


def _check_secure(place: Meeting, key_file: str | None) -> None:
    """Without keys, processes of one machine alone speak with each other."""
    if key_file is None and place.path is None and not place.local:
        raise meeting.unsecured(place)


def _check_hand_keys(cfg: DictConfig) -> None:
    """Keys of processes that are started by hand do nothing elsewhere: say so."""
    for key in ("rank", "rendezvous"):
        if cfg.cluster[key] is not None:
            raise ConfigError(
                f"cluster.{key}={cfg.cluster[key]} was set; it is for processes that are started by hand.",
                hint=f"set cluster=manual too, or leave out cluster.{key}.",
            )
    if cfg.cluster.standalone and cfg.cluster.kind in ("auto", cluster.LOCAL):
        raise ConfigError(
            f"cluster.standalone={list(cfg.cluster.standalone)} was set; servers that are started by hand need a "
            "rendezvous to be found.",
            hint="set cluster=manual with cluster.rank= and cluster.rendezvous=, or leave out cluster.standalone.",
        )


def _logs(cfg: DictConfig) -> Path:
    return Path(cfg.paths.run, "logs").absolute()
