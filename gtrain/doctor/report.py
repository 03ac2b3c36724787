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
        ConfigError: an argument is none of these, or its value cannot be used.
    """
    settings = read(arguments)
    place = machine.launcher()
    if place["rank"] != 0:
        return 0  # rank 0 speaks for all
    facts = collect()
    ranks = place["ranks_here"] or settings["trainer.num_nodes"] * settings["trainer.devices"]
    found = judge(facts, ranks, settings["strategy"])
    if settings["format"] == "json":
        print(json.dumps({**facts, "problems": [dataclasses.asdict(finding) for finding in found]}, indent=2))
    else:
        print("\n".join(lines(facts, found)))
    return int(any(finding.essential for finding in found))


def read(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings of the command line."""
    settings: dict[str, Any] = {"format": "text", "strategy": None, "trainer.num_nodes": 1, "trainer.devices": 1}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in KEYS:
            raise ConfigError(
                f"gtrain doctor was given {argument}; it reads {', '.join(KEYS)}.",
                hint=did_you_mean(key, KEYS) or "leave it out: no model or data is looked at.",
            )
        if key == "format" and value not in FORMATS:
            raise ConfigError(f"format={value} was set for gtrain doctor.", hint=f"choose {' or '.join(FORMATS)}.")
        if key.startswith("trainer.") and not (value.isdecimal() and int(value) > 0):
            raise ConfigError(f"{argument} was set; it must be a number from 1.", hint=f"set {key}=1.")
        settings[key] = int(value) if key.startswith("trainer.") else value
    return settings


def collect() -> dict[str, Any]:
    """Everything that is printed, without judgement; sizes in bytes."""
    steps = probe.facts()
    imports = {
        name.removeprefix("import "): step["error"] for name, step in steps.items() if name.startswith("import ")
    }
    imports |= {name: step["error"] for name, step in steps.items() if name == "python"}
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
    step = steps.get(f"strategy {name}", {"error": "was not reached: an import before it failed", "value": None})
    error = step["error"]
    if error is not None and error.startswith("ConfigError: "):
        error = error.removeprefix("ConfigError: ")
    return {"from": origin, "error": error, **(step["value"] or {})}


def lines(facts: dict[str, Any], found: Sequence[Finding]) -> Iterator[str]:
    """What is printed for people to read."""
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
    for finding in found:
        yield f"{'BROKEN' if finding.essential else 'NOTE'}: {finding.message}"
        yield f"HINT: {finding.hint}"
    if not found:
        yield "No problems found."


def _machine_lines(facts: dict[str, Any]) -> Iterator[str]:
    cores, memory, gpus, kernels = facts["cores"], facts["memory"], facts["gpus"], facts["kernels"]
    place, environment = facts["cluster"], facts["environment"]
    yield "machine"
    yield f"  {'host':<16} {facts['host']['name']}, {facts['host']['system']}"
    limit = "" if cores["limit"] is None else f", limited to {cores['limit']:g}"
    yield f"  {'cores':<16} {cores['usable']} usable of {cores['machine']}{limit}"
    limit = "" if memory["limit"] is None else f", limited to {size(memory['limit'])}"
    yield f"  {'memory':<16} {size(memory['available'])} free of {size(memory['total'])}{limit}"
    for title, name in (("shared memory", "shared_memory"), ("temporary", "temporary_folder")):
        yield f"  {title:<16} {_place(facts[name])}"
    devices = [] if gpus is None else [f"{gpu['name']} ({size(gpu['memory'])})" for gpu in gpus["devices"]]
    yield f"  {'GPUs':<16} {', '.join(devices) or 'none'}"
    yield f"  {'open files':<16} {facts['open_files']['limit']} a process"
    yield f"  {'kernel cache':<16} {(kernels or {}).get('cache') or 'none that can be written'}"
    yield f"  {'environment':<16} {', '.join(f'{k}={v}' for k, v in environment.items()) or 'nothing set'}"
    given = place["world_size"] is None
    yield f"  {'launcher':<16} " + (
        f"{place['launcher']}: gtrain starts the ranks"
        if given
        else f"{place['launcher']}, {place['world_size']} ranks"
    )


def _place(facts: dict[str, Any]) -> str:
    if not facts["writable"]:
        return f"{facts['path']}, cannot be written"
    return f"{facts['path']}, {size(facts['free'])} free of {size(facts['total'])}"


def _package_lines(facts: dict[str, Any]) -> Iterator[str]:
    yield "versions"
    yield f"  {'python':<16} {facts['python']}"
    yield f"  {'gtrain':<16} {facts['gtrain'] or 'not installed'}"
    for name, state in facts["dependencies"].items():
        wrong = "" if state["ok"] else f"  (needs {state['needed']})"
        yield f"  {name:<16} {state['installed'] or 'NOT INSTALLED'}{wrong}"
    yield "extras"
    for name, state in facts["extras"].items():
        missing = ", ".join(state["missing"])
        yield f"  {name:<16} " + (f"missing {missing}: {state['command']}" if missing else "installed")
