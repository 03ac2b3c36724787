"""``gtrain doctor``: collect, judge, print."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from gtrain import backends
from gtrain.doctor import machine, packages, probe
from gtrain.doctor.findings import Finding, judge, size
from gtrain.errors import ConfigError
from gtrain.messages import did_you_mean

FORMATS = ("text", "json")
KEYS = ("format", "strategy", "trainer.num_nodes", "trainer.devices")


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
    if launcher["rank"] != 0:
        return 0  # rank 0 prints
    facts = collect()
    ranks = launcher["ranks_here"] or settings["trainer.num_nodes"] * settings["trainer.devices"]
    findings = judge(facts, ranks, settings["strategy"])
    if settings["format"] == "json":
        print(json.dumps({**facts, "problems": [dataclasses.asdict(finding) for finding in findings]}, indent=2))
    else:
        print("\n".join(lines(facts, findings)))
    return int(any(finding.essential for finding in findings))


def read(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse the command line."""
    settings: dict[str, Any] = {"format": "text", "strategy": None, "trainer.num_nodes": 1, "trainer.devices": 1}
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
            raise ConfigError(f"{argument} was set; it must be an integer from 1.", hint=f"set {key}=1.")
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
    for title, name in (("shared memory", "shared_memory"), ("temporary", "temporary_folder")):
        yield f"  {title:<16} {_folder(facts[name])}"
    devices = [] if gpus is None else [f"{gpu['name']} ({size(gpu['memory'])})" for gpu in gpus["devices"]]
    yield f"  {'GPUs':<16} {', '.join(devices) or 'none'}"
    yield f"  {'open files':<16} {facts['open_files']['limit']} per process"
    yield f"  {'kernel cache':<16} {(kernels or {}).get('cache') or 'not writable'}"
    yield f"  {'environment':<16} {', '.join(f'{k}={v}' for k, v in environment.items()) or 'nothing set'}"
    ranks = ": gtrain starts the ranks" if cluster["world_size"] is None else f", {cluster['world_size']} ranks"
    yield f"  {'launcher':<16} {cluster['launcher']}{ranks}"


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
