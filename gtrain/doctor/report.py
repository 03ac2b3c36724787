"""``gtrain doctor``: collect, judge, print."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gtrain import backends
from gtrain.doctor import calibration, machine, packages, probe
from gtrain.doctor.machine import PINNING_VARIABLES, THREAD_VARIABLES
from gtrain.doctor.probe import KAMINPAR, METIS
from gtrain.errors import ConfigError
from gtrain.messages import did_you_mean
from gtrain.units import size

FORMATS = ("text", "json")
KEYS = (
    *("format", "strategy", "trainer.num_nodes", "trainer.devices", "calibrate"),
    *("cluster.key_file", "cluster.rendezvous"),
)
GIB = 2**30
_AUTO = "auto"  # config.AUTO; that module imports Hydra, which may be broken


@dataclass(frozen=True)
class Finding:
    """A problem.

    Attributes:
        message: describes it.
        hint: how to solve it.
        essential: gtrain cannot train until it is solved; the command then exits with 1.
    """

    message: str
    hint: str
    essential: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: of :data:`KEYS`, as ``key=value``.

    Returns:
        The exit code: 1 if gtrain cannot train here, else 0.

    Raises:
        ConfigError: an argument is unknown, or its value is invalid.
    """
    settings = read(arguments)
    launcher = machine.launcher()
    if launcher["rank"] != 0:  # rank 0 prints
        _network(launcher, settings)
        return 0
    facts = {**collect(), "calibration": calibration.facts(measure=settings["calibrate"])}
    works = facts["imports"].get("torch") is None
    facts["network"] = _network(launcher, settings) if works else None
    ranks = launcher["ranks_here"] or settings["trainer.num_nodes"] * settings["trainer.devices"]
    findings = judge(facts, ranks, settings["strategy"])
    if settings["format"] == "json":
        print(json.dumps({**facts, "problems": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print("\n".join(lines(facts, findings)))
    return int(any(finding.essential for finding in findings))


def _network(launcher: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the facts of the network between the ranks that a launcher started; None without others."""
    if (launcher["world_size"] or 1) == 1:
        return None
    # Imports torch, which may be what is broken.
    from gtrain.doctor import network

    return network.facts(settings["cluster.key_file"], settings["cluster.rendezvous"])


def read(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse the command line."""
    settings: dict[str, Any] = {
        "format": "text",
        "strategy": None,
        "trainer.num_nodes": 1,
        "trainer.devices": 1,
        "calibrate": False,
        "cluster.key_file": None,
        "cluster.rendezvous": None,
    }
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in KEYS:
            raise ConfigError(
                f"gtrain doctor was given {argument}; it reads {', '.join(KEYS)}.",
                hint=did_you_mean(key, KEYS) or "remove it: the command reads neither model nor data.",
            )
        if key == "format" and value not in FORMATS:
            raise ConfigError(f"format={value} was set for gtrain doctor.", hint=f"choose {' or '.join(FORMATS)}.")
        if key.startswith("trainer.") and not (value.isdecimal() and int(value) > 0):
            raise ConfigError(f"{argument} was set; it must be an integer above 0.", hint=f"set {key}=1.")
        if key == "calibrate" and value not in ("true", "false"):
            raise ConfigError(f"{argument} was set for gtrain doctor.", hint="choose true or false.")
        if key == "calibrate":
            settings[key] = value == "true"
        else:
            settings[key] = int(value) if key.startswith("trainer.") else value
    return settings


def collect() -> dict[str, Any]:
    """Return all facts; sizes in bytes."""
    steps = probe.facts()
    imports = {
        name.removeprefix("import "): step["error"]
        for name, step in steps.items()
        if name.startswith("import ") or name == "python"
    }
    gpus, kernels = steps.get("gpus", {}), steps.get("kernels", {})
    return {
        "packages": packages.facts(),
        **machine.facts(),
        "imports": imports,
        "failed": {
            name: steps[name]["error"] for name in ("gpus", "kernels") if name in steps and steps[name]["error"]
        },
        "gpus": gpus.get("value"),
        "triton": steps.get("triton"),
        "kernels": kernels.get("value"),
        "strategies": {name: _strategy(name, point.value, steps) for name, point in backends.installed().items()},
        "outdated": backends.installed().outdated,
    }


def _strategy(name: str, origin: str, steps: dict[str, dict[str, Any]]) -> dict[str, Any]:
    step = steps.get(f"strategy {name}", {"error": "was not checked: an earlier import failed", "value": None})
    error = None if step["error"] is None else step["error"].removeprefix("ConfigError: ")
    return {"from": origin, "error": error, **(step["value"] or {})}


def lines(facts: dict[str, Any], findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines of the text format."""
    yield from _machine_lines(facts)
    yield from _device_lines(facts)
    yield from _network_lines(facts.get("network"))
    yield from _calibration_lines(facts.get("calibration"))
    yield from _package_lines(facts["packages"])
    yield "strategies"
    for name, state in facts["strategies"].items():
        if state["error"] is not None:
            yield f"  {name:<16} CANNOT BE USED: {state['error']} ({state['from']})"
            continue
        models = "all models" if state["models"] is None else f"models: {', '.join(state['models'])}"
        servers = f"; servers: {', '.join(state['servers'])}" if state["servers"] else ""
        yield f"  {name:<16} {state['description']} ({models}{servers})"
    yield ""
    for finding in findings:
        yield f"{'BROKEN' if finding.essential else 'NOTE'}: {finding.message}"
        yield f"HINT: {finding.hint}"
    if not findings:
        yield "No problems found."


def _machine_lines(facts: dict[str, Any]) -> Iterator[str]:
    cores, memory, gpus, kernels = facts["cores"], facts["memory"], facts["gpus"], facts["kernels"]
    cluster, environment = facts["cluster"], facts["environment"]
    yield "machine"
    yield f"  {'host':<16} {facts['host']['name']}, {facts['host']['system']}"
    limit = "" if cores["limit"] is None else f", limited to {cores['limit']:g}"
    yield f"  {'cores':<16} {cores['usable']} usable of {cores['machine']}{limit}"
    limit = "" if memory["limit"] is None else f", limited to {size(memory['limit'])}"
    yield f"  {'memory':<16} {size(memory['available'])} free of {size(memory['total'])}{limit}"
    folders = {"shared memory": "shared_memory", "temporary": "temporary_folder", "current folder": "current_folder"}
    for title, name in folders.items():
        if name in facts:
            yield f"  {title:<16} {_folder(facts[name])}"
    count = 0 if gpus is None else len(gpus["devices"])
    built = "" if gpus is None or gpus["built_for"] else " that torch can use: it is built without CUDA"
    yield f"  {'GPUs':<16} {count or f'none{built}'}"
    yield f"  {'open files':<16} {facts['open_files']['limit']} per process"
    yield f"  {'kernel cache':<16} {(kernels or {}).get('cache') or 'not writable'}"
    yield f"  {'environment':<16} {', '.join(f'{k}={v}' for k, v in environment.items()) or 'nothing set'}"
    ranks = ": gtrain starts the ranks" if cluster["world_size"] is None else f", {cluster['world_size']} ranks"
    yield f"  {'launcher':<16} {cluster['launcher']}{ranks}"


def _device_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield what is known of the GPUs, and what each strategy does on them; nothing without GPUs."""
    gpus, triton = facts["gpus"], facts["triton"]
    if gpus is None or not gpus["devices"]:
        return
    yield "GPUs"
    for number, gpu in enumerate(gpus["devices"]):
        numbers = "bfloat16" if gpu["bfloat16"] else "no bfloat16"
        yield (
            f"  {f'cuda:{number}':<16} {gpu['name']}, {size(gpu['free'])} free of {size(gpu['memory'])}, compute "
            f"capability {gpu['capability']}, {numbers}"
        )
    yield f"  {'CUDA':<16} torch is built for {gpus['built_for']}, the driver supports {gpus['driver'] or 'unknown'}"
    if triton is None:
        state = "not checked"
    else:
        state = "CANNOT BE USED" if triton["error"] else f"{triton['value']['version']}, compiles kernels"
    yield f"  {'Triton':<16} {state}"
    yield f"  {'NCCL':<16} {gpus['nccl'] or 'not in this torch'}"
    for name, state in facts["strategies"].items():
        if state["error"] is None:
            on_cpus = "not used: trains on CPUs" if state["gpu"] is None else "used"
            yield f"  {name:<16} {state['gpu'] or on_cpus}"


def _network_lines(facts: dict[str, Any] | None) -> Iterator[str]:
    """Yield the rates between rank 0 and the others; nothing without a launcher."""
    if facts is None:
        return
    yield "network from rank 0" + (", encrypted between machines" if facts["encrypted"] else "")
    if facts["error"] is not None:
        yield f"  not measured: {facts['error']}"
    for row in facts["connections"]:
        rates = f"{row['to'] / 1e9:.3g} GB/s there, {row['from'] / 1e9:.3g} back"
        where = f"rank {row['rank']}"
        yield f"  {where:<16} {rates}, {row['latency'] * 1e6:.3g} us a message ({row['host']})"


def _calibration_lines(facts: dict[str, Any] | None) -> Iterator[str]:
    """Yield the constants by which ``gtrain plan`` computes."""
    if facts is None:
        return
    yield "constants of gtrain plan"
    if facts["error"] is not None:
        yield f"  not measured: {facts['error']}"
    if facts["constants"] is None:
        yield "  defaults: gtrain doctor calibrate=true measures those of this machine in about a minute"
        return
    constants, giga = facts["constants"], 1e9
    yield f"  {'file':<16} {facts['file']}"
    rates = f"{constants['flops'] / giga:.3g} GFLOP/s, {constants['flops_bfloat16'] / giga:.3g} in bfloat16"
    yield f"  {'a core':<16} {rates}"
    memory = ", ".join(
        f"{name} {constants[name] / giga:.3g}" for name in ("stream", "gather", "attention", "bandwidth")
    )
    yield f"  {'memory, GB/s':<16} {memory}"
    yield f"  {'disk, GB/s':<16} {constants['disk'] / giga:.3g}"
    yield f"  {'ranks, GB/s':<16} {constants['link'] / giga:.3g}, {constants['wake'] * 1e6:.3g} us a message"


def _folder(facts: dict[str, Any]) -> str:
    if not facts["writable"]:
        return f"{facts['path']}, not writable"
    return f"{facts['path']}, {size(facts['free'])} free of {size(facts['total'])}"


def _package_lines(facts: dict[str, Any]) -> Iterator[str]:
    yield "versions"
    yield f"  {'python':<16} {facts['python']}"
    yield f"  {'gtrain':<16} {facts['gtrain'] or 'not installed'}"
    for name, state in facts["dependencies"].items():
        needed = "" if state["ok"] else f"  (needs {state['needed']})"
        yield f"  {name:<16} {state['installed'] or 'NOT INSTALLED'}{needed}"
    yield "extras"
    for name, state in facts["extras"].items():
        missing = ", ".join(state["missing"])
        yield f"  {name:<16} " + (f"missing {missing}: {state['command']}" if missing else "installed")


# ---------------------------------------------------------------------------------------------------- problems


def judge(facts: dict[str, Any], ranks: int, strategy: str | None) -> list[Finding]:
    """Return all problems, essential ones first.

    Args:
        facts: from :func:`gtrain.doctor.report.collect`.
        ranks: planned processes on this machine.
        strategy: the one that must work; None, or ``auto``, which chooses among them: any of them.
    """
    findings = [
        *_packages(facts["packages"]),
        *_imports(facts["imports"]),
        *_strategies(facts["strategies"], None if strategy == _AUTO else strategy),
        *(
            Finding(f"{folder} has an .egg-info or .dist-info of an older build, with other strategies.", "delete it.")
            for folder in facts["outdated"]
        ),
        *_folders(facts),
        *_memory(facts["memory"], ranks),
        *_threads(facts, ranks),
        *_devices(facts, ranks),
    ]
    return sorted(findings, key=lambda finding: not finding.essential)


def _packages(facts: dict[str, Any]) -> Iterator[Finding]:
    if facts["gtrain"] is None:
        yield Finding(
            "gtrain runs from its source folder and is not installed: no strategy is available.",
            "pip install -e . in that folder.",
            essential=True,
        )
    for name, state in facts["dependencies"].items():
        if state["ok"] and state["installed"] is not None:
            continue
        if state["installed"] is not None:
            message = f"{name} {state['installed']} is installed; gtrain needs {state['needed']}."
        elif name == METIS:
            other = facts["dependencies"].get(KAMINPAR, {"installed": None})["installed"]
            method = "ldg" if other is None else "kaminpar"
            message = (
                f"{name} is not installed: data.partitioner=auto is {method}, and data.partitioner=metis is refused."
            )
        elif name == KAMINPAR:
            message = (
                f"{name} is not installed: partitioning large graphs takes several times longer, and "
                "data.partitioner=kaminpar is refused."
            )
        else:
            message = f"{name} is not installed."
        bound = "" if state["needed"] == "any" else state["needed"]
        essential = state["installed"] is None and name not in (METIS, KAMINPAR)
        yield Finding(message, f'pip install "{name}{bound}".', essential)


def _imports(facts: dict[str, Any]) -> Iterator[Finding]:
    for name, error in facts.items():
        if error is not None:
            package = name.partition(".")[0]
            yield Finding(
                f"import {name} fails: {error}.", f"reinstall the package that provides {package}.", essential=True
            )


def _strategies(facts: dict[str, Any], required: str | None) -> Iterator[Finding]:
    usable = [name for name, state in facts.items() if state["error"] is None]
    for name, state in facts.items():
        if state["error"] is not None:
            yield Finding(
                f"strategy={name} cannot be used: {state['error']}.",
                f"reinstall the package that provides {state['from']}.",
                essential=name == required or not usable,
            )
    if required is not None and required not in facts:
        yield Finding(
            f"strategy={required} is not installed.",
            f"the installed strategies are {', '.join(facts) or 'none'}.",
            essential=True,
        )
    if not facts:
        yield Finding("no strategy is installed.", "reinstall gtrain: pip install -U gtrain.", essential=True)


def _folders(facts: dict[str, Any]) -> Iterator[Finding]:
    shared, temporary, kernels = facts["shared_memory"], facts["temporary_folder"], facts["kernels"]
    if not shared["writable"]:
        yield Finding(
            f"{shared['path']} cannot be written: ranks of one machine cannot share memory.",
            "mount a tmpfs there, in a container with --shm-size=8g or --ipc=host.",
        )
    elif shared["free"] < GIB:
        yield Finding(
            f"{shared['path']} has {size(shared['free'])} free of {size(shared['total'])}; ranks share tables there.",
            "raise it: in a container --shm-size=8g or --ipc=host, otherwise mount -o remount,size=8g /dev/shm.",
        )
    if not temporary["writable"]:
        yield Finding(
            f"the temporary folder {temporary['path']} cannot be written.",
            "set TMPDIR to a folder that can.",
            essential=True,
        )
    elif temporary["free"] < GIB:
        yield Finding(
            f"the temporary folder {temporary['path']} has {size(temporary['free'])} free.",
            "set TMPDIR to a folder with more room, or clear it.",
        )
    if kernels is not None and not kernels["writable"]:
        yield Finding(
            "compiled kernels cannot be cached: each process compiles them again, which takes seconds.",
            "set NUMBA_CACHE_DIR to a folder that can be written.",
        )


def _memory(facts: dict[str, Any], ranks: int) -> Iterator[Finding]:
    available = facts["available"] if facts["limit"] is None else min(facts["available"], facts["limit"])
    if available < ranks * GIB:
        yield Finding(
            f"{size(available)} of memory free for {ranks} rank(s): each needs {size(GIB // 2)} before its data.",
            "end other programs, or run fewer ranks on this machine.",
        )


def _threads(facts: dict[str, Any], ranks: int) -> Iterator[Finding]:
    environment, cores = facts["environment"], facts["cores"]
    usable = min(cores["usable"], max(1, int(cores["limit"] or cores["usable"])))
    share = max(1, usable // ranks)  # threads per rank
    if ranks > usable:
        yield Finding(f"{ranks} ranks share {usable} cores.", f"run at most {usable} ranks on this machine.")
    if "OMP_NUM_THREADS" not in environment and ranks > 1:
        yield Finding(
            f"OMP_NUM_THREADS is not set: torch uses {share} threads per rank, but numpy's libraries use all "
            f"{usable} cores in each of the {ranks} ranks.",
            f"export OMP_NUM_THREADS={share}.",
        )
    for name in THREAD_VARIABLES:
        value = environment.get(name, "")
        # One thread per rank is the least: then the ranks are too many, not the threads.
        if value.isdigit() and int(value) * ranks > usable and int(value) > 1:
            yield Finding(
                f"{name}={value} with {ranks} ranks makes {int(value) * ranks} threads on {usable} cores.",
                f"export {name}={share}, or unset it.",
            )
    for name in PINNING_VARIABLES:
        if ranks > 1 and environment.get(name, "false").lower() not in ("false", "disabled", "none"):
            yield Finding(
                f"{name}={environment[name]} pins threads: those of all ranks may share the same cores.",
                f"unset {name}, or let the launcher bind ranks to cores.",
            )
    if cores["limit"] is not None and cores["limit"] < cores["usable"] and "OMP_NUM_THREADS" not in environment:
        yield Finding(
            f"the container may use {cores['limit']:g} of {cores['usable']} cores, a limit that programs do not see.",
            f"export OMP_NUM_THREADS={share}.",
        )


def _devices(facts: dict[str, Any], ranks: int) -> Iterator[Finding]:
    for name, error in facts["failed"].items():
        yield Finding(f"the check of {name} fails: {error}.", "reinstall torch (gpus) or numba (kernels).")
    gpus = facts["gpus"]
    if gpus is not None and not gpus["devices"] and glob.glob("/dev/nvidia[0-9]*"):
        built = f"for CUDA {gpus['built_for']}" if gpus["built_for"] else "without CUDA"
        yield Finding(
            f"the machine has an NVIDIA device that torch, built {built}, does not see.",
            "install a torch built for the driver's CUDA version, and check CUDA_VISIBLE_DEVICES.",
        )
    count = 0 if gpus is None else len(gpus["devices"])
    if 0 < count < ranks:
        yield Finding(
            f"with trainer.accelerator=gpu, {ranks} ranks share {count} GPU(s): each has a part of the memory, and "
            "their kernels take turns.",
            f"start {count} rank(s) on this machine; several ranks per GPU are for tests.",
        )
    if count and facts["triton"] is not None and facts["triton"]["error"] is not None:
        yield Finding(
            f"Triton cannot be used: {facts['triton']['error']}. On GPUs, layers run as many operations of torch, "
            "which is slow.",
            "install what is missing: triton in the release that this torch needs, a C compiler, or the headers of "
            "Python (on Debian: apt install gcc python3-dev).",
        )
    if facts["open_files"]["limit"] < 1024:
        yield Finding(f"a process may open {facts['open_files']['limit']} files.", "ulimit -n 65536.")
