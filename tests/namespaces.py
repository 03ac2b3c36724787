"""One network namespace per machine of a job, so that a test can take links down. Needs root and ``ip``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked import Program, lasting
from helpers import REPO

_ENTER = str(REPO / "tests" / "assets" / "in_namespace.py")


class Network:
    """One namespace per machine, joined by a bridge in one more namespace, as by a switch.

    Args:
        machines: number of machines.
        rate: limit of what each machine sends, in the notation of tc, such as ``100mbit``; None: no limit.
        strangers: how many of them, the last ones, do not belong to the job.
    """

    def __init__(self, machines: int, rate: str | None = None, strangers: int = 0) -> None:
        self._rate, self._strangers = rate, strangers
        self._hub = f"gtrain-{os.getpid()}-hub"
        self._names = [f"gtrain-{os.getpid()}-{machine}" for machine in range(machines)]

    def make(self) -> None:
        """Make the namespaces, and the links between them."""
        _ip(f"netns add {self._hub}")
        _ip(f"-n {self._hub} link add bridge type bridge")
        _ip(f"-n {self._hub} link set bridge up")
        for machine, name in enumerate(self._names):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link add eth0 type veth peer name port{machine} netns {self._hub}")
            _ip(f"-n {name} addr add {self.address(machine)}/24 dev eth0")
            for where, link in ((name, "eth0"), (name, "lo"), (self._hub, f"port{machine}")):
                _ip(f"-n {where} link set {link} up")
            _ip(f"-n {name} route add default dev eth0")
            _ip(f"-n {self._hub} link set port{machine} master bridge")
            if self._rate is not None:
                limit = f"tc -n {name} qdisc add dev eth0 root tbf rate {self._rate} burst 256kb latency 50ms"
                subprocess.run(limit.split(), capture_output=True, check=True, text=True)

    def remove(self) -> None:
        """Remove what :meth:`make` made, all of it or less."""
        for name in (*self._names, self._hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def address(self, machine: int) -> str:
        """The address of a machine."""
        return f"10.77.0.{machine + 1}"

    def link(self, machine: int, state: str) -> None:
        """Take the port of a machine at the switch ``down``, or ``up`` again."""
        _ip(f"-n {self._hub} link set port{machine} {state}")

    def start(
        self,
        machine: int,
        folder: Path,
        *arguments: str,
        rank: int | None = None,
        access: str | None = "cluster.isolated=true",
    ) -> Program:
        """Start ``gtrain ARGUMENTS`` on a machine, as its share of a job that trains until it is :func:`enough`.

        Results are in the folder ``run``, logs of other machines than the first in ``run-<machine>``.

        Args:
            machine: the machine.
            folder: where all machines of the job run.
            arguments: of the command.
            rank: ``cluster.rank``, if it is not the number of the machine.
            access: the setting that says who may take part in the job, if any.
        """
        number = f"cluster.rank={machine if rank is None else rank}"
        job = (f"trainer.num_nodes={len(self._names) - self._strangers}", "cluster=manual", number)
        meet = (f"cluster.rendezvous=file://{folder}/rendezvous", *([] if access is None else [access]))
        run = f"run-{machine}" if machine else "run"
        program = (_ENTER, self._names[machine], "gtrain")
        return lasting(folder, *arguments, *job, *meet, run=run, program=program)

    def run(
        self,
        machine: int,
        folder: Path,
        module: str,
        *arguments: str,
        disk: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Program:
        """Start ``python -m MODULE ARGUMENTS`` on a machine; the module may be one of the tests'.

        Args:
            machine: the machine.
            folder: in which it runs.
            module: the module.
            arguments: of the module.
            disk: the folder that this machine sees as ``folder``; None if all machines see the same one.
            env: more environment variables.
        """
        path = os.pathsep.join([str(Path(__file__).parent), str(REPO / "tests" / "assets")])
        name = self._names[machine] if disk is None else f"{self._names[machine]}:{disk}"
        return Program(_ENTER, name, module, *arguments, cwd=folder, env={"PYTHONPATH": path, **(env or {})})


@contextmanager
def network(machines: int, rate: str | None = None, strangers: int = 0) -> Iterator[Network]:
    """Machines that are gone afterwards; skips the test where they cannot be made."""
    made = Network(machines, rate, strangers)
    try:
        if os.geteuid() != 0:
            pytest.skip("network namespaces take root")
        try:
            made.make()
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}")
        yield made
    finally:
        if os.geteuid() == 0:
            made.remove()


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], capture_output=True, check=True, text=True)
