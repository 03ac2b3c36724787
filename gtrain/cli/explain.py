"""``gtrain explain``: print the meaning of settings from the dataclasses that declare them. Light: imports no torch."""

from __future__ import annotations

import dataclasses
import importlib.resources
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from gtrain import backends, config, messages
from gtrain.data.config import SCHEMAS
from gtrain.errors import ConfigError
from gtrain.launch import launchers
from gtrain.model.config import ModuleConfig, NetworkConfig
from gtrain.plan.machine import Machine
from gtrain.settings import as_typed, changed, default_of, limits, setting

JOB = "job"
"""The group name of the settings at the top."""
_WIDTH = 110


@cache
def declared() -> dict[str, dict[str, type]]:
    """Return the dataclasses that declare settings, by group and option (``""`` in a group without options)."""
    return {
        JOB: {"": config.JobConfig},
        "strategy": {
            config.AUTO: config.AutoConfig,
            **{name: backend.load_config() for name, backend in backends.usable().items()},
        },
        "data": dict(SCHEMAS),
        "model": {name: _model_settings(name, text) for name, text in yaml_texts()["model"].items()},
        "trainer": {"": config.TrainerConfig},
        "cluster": {"": config.ClusterConfig, "ray": config.RayClusterConfig},
        "paths": {"": config.PathsConfig},
        "plan": {"": config.PlanConfig},
        "machine": {"": Machine},
    }


@cache
def yaml_texts() -> dict[str, dict[str, str]]:
    """Return the YAML text of each option by group: files of gtrain and the backends, and the launchers' options."""
    texts: dict[str, dict[str, str]] = {"cluster": launchers.options()}
    for package in ("gtrain.conf", *(backend.conf for backend in backends.usable().values())):
        for folder in sorted(importlib.resources.files(package).iterdir(), key=lambda path: path.name):
            for file in sorted(folder.iterdir(), key=lambda path: path.name) if folder.is_dir() else ():
                if file.name.endswith(".yaml"):
                    texts.setdefault(folder.name, {})[file.name.removesuffix(".yaml")] = file.read_text()
    return texts


def _model_settings(name: str, text: str) -> type:
    """Return a dataclass of a model's settings.

    Its YAML file gives the defaults; the shared dataclasses, or else the comments of the file, give the meanings.
    """
    known = _fields(NetworkConfig, ModuleConfig)
    content = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(content, dict)
    rows = []
    for key, value in content.items():
        if key in known:
            field = changed(NetworkConfig if key in _fields(NetworkConfig) else ModuleConfig, str(key), value)
            rows.append((str(key), known[str(key)].type, field))
        elif key != "_target_":
            comment = re.search(rf"^{key!s}:.*?#\s*(.+)$", text, re.MULTILINE)
            described = setting(value, comment[1] if comment else "", type="" if value is not None else "any or null")
            rows.append((str(key), type(value).__name__, described))
    summary = re.match(r"# (.+)", text)
    return dataclasses.make_dataclass(name, rows, namespace={"__doc__": summary[1] if summary else content["_target_"]})


def main(topics: Sequence[str]) -> None:
    """Print the explanation of each topic; without a topic, the list of topics.

    Raises:
        ConfigError: a topic is neither a key, nor a group, nor an option; lists the closest ones.
    """
    print("\n\n".join(map(explain, topics)) if topics else _overview())


def explain(topic: str) -> str:
    """Return the explanation of a key, ``GROUP=OPTION`` or a group.

    Raises:
        ConfigError: the setting, group or option does not exist; lists the closest ones.
    """
    group, equals, option = topic.partition("=")
    if equals and "." not in group and group in (*declared(), *yaml_texts()):
        return _explain_option(group, option)
    if group in declared() and "" in declared()[group]:
        return _explain_settings(group, declared()[group][""])
    if group in declared() or group in yaml_texts():
        lines = [f"  {group}={option:<16} {_summary(group, option)}".rstrip() for option in _options(group)]
        return "\n".join([f"{group}=OPTION chooses one of", *lines])
    return _explain_key(group)  # the key of KEY or KEY=VALUE


def keys() -> list[str]:
    """Return every declared key."""
    return sorted(
        {_full_key(group, name) for group, options in declared().items() for name in _fields(*options.values())}
    )


# ------------------------------------------------------------------------------------------------------- topics


def _overview() -> str:
    lines = ["gtrain explain KEY, GROUP=OPTION or GROUP; such as data.split, strategy=single, trainer", ""]
    for group in dict.fromkeys([*declared(), *sorted(yaml_texts())]):
        lone = declared().get(group, {}).get("")
        names = list(_fields(lone)) if lone else [f"{group}={option}" for option in _options(group)]
        lines.append(_wrapped(", ".join(names), f"  {group:<15} ", " " * 18))
    return "\n".join(lines)


def _explain_option(group: str, option: str) -> str:
    options = _options(group)
    if option not in options:
        raise ConfigError(
            f"explain {group}={option} was given; the options of {group} are {', '.join(options)}.",
            hint=messages.did_you_mean(option, options) or f"choose one of these for {group}.",
        )
    text = yaml_texts().get(group, {}).get(option, "")
    if option not in declared().get(group, {}):
        return f"{group}={option}\n\n{text.strip()}"
    title = f"{group}={option}: {_summary(group, option)}"
    settings = _explain_settings(group, declared()[group][option])
    return "\n".join([_wrapped(title, "", "  "), *_preset_lines(text, group), "", settings])


def settings_of(owner: type) -> str:
    """Return the explanation of the settings that a dataclass declares, outside of the groups."""
    return _explain_settings(JOB, owner)


def _explain_settings(group: str, owner: type) -> str:
    fields = _fields(owner).values()
    return "\n".join(
        line for field in fields for line in _entry_lines(_full_key(group, field.name), field, _default(field))
    )


def _explain_key(key: str) -> str:
    group, _, name = key.rpartition(".")
    options = declared().get(group or JOB, {})
    fields = {option: _fields(owner)[name] for option, owner in options.items() if name in _fields(owner)}
    if not fields and not group:
        # A shortcut at the top level for a key of a strategy.
        shortcuts = _fields(
            *(backend.load_config() for backend in backends.usable().values() if name in backend.shortcuts)
        )
        fields = {"": shortcuts[name]} if name in shortcuts else {}
    if not fields:
        all_keys = keys()
        same_name = [other for other in all_keys if other.rpartition(".")[2] == name]
        hint = f"did you mean {' or '.join(same_name)}?" if same_name else None
        hint = hint or messages.did_you_mean(key, [*all_keys, *declared(), *yaml_texts()])
        raise ConfigError(
            f"explain {key} was given; no such setting or group exists.",
            hint=hint or "gtrain explain lists the groups and their options.",
        )
    # Options that declare the key alike share an entry; their defaults may differ.
    declarations: dict[str, list[str]] = {}
    for option, field in fields.items():
        declarations.setdefault(f"{field.metadata.get('help')}{field.metadata.get('words')}", []).append(option)
    lines: list[str] = []
    for names in declarations.values():
        defaults: dict[str, list[str]] = {}
        for option in names:
            defaults.setdefault(_default(fields[option]), []).append(option)
        usual = max(defaults, key=lambda value: len(defaults[value]))
        others = [f"{value} with {group}={', '.join(of)}" for value, of in defaults.items() if value != usual]
        lines += _entry_lines(key, fields[names[0]], "; ".join([usual, *others]))
        if names != [""] and len(names) < len(options):
            lines.append(_wrapped(f"with {group}={', '.join(names)}", "    ", "      "))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- lines


def _entry_lines(key: str, field: dataclasses.Field[Any], default: str) -> Iterator[str]:
    yield _wrapped(f"{key} ({type_of(field)}; {default})", "", "      ")
    if field.metadata.get("help"):
        yield _wrapped(_without_markdown(field.metadata["help"]), "    ", "    ")
    if limits(field):
        yield f"    {limits(field)}"
    words = field.metadata.get("words")
    if isinstance(words, dict):
        width = max(len(as_typed(word)) for word in words)
        for word, text in words.items():
            yield _wrapped(f"{as_typed(word):<{width}}  {_without_markdown(text)}", "      ", " " * (8 + width))
    elif words:
        yield _wrapped(" | ".join(map(as_typed, words)), "      ", "      ")


def type_of(field: dataclasses.Field[Any]) -> str:
    """Return the type of a setting, such as ``int or null``."""
    return field.metadata.get("type") or str(field.type).replace(" | ", " or ").replace("None", "null")


def _default(field: dataclasses.Field[Any]) -> str:
    default = default_of(field)
    return "must be set" if default == "???" else f"default {as_typed(default)}"


def _summary(group: str, option: str) -> str:
    if group == "strategy" and option in backends.usable():
        return backends.get(option).description
    owner = declared().get(group, {}).get(option)
    if owner is None:
        comment = re.match(r"(?:# @.*\n)?# (.+)", yaml_texts()[group][option])
        return comment.group(1) if comment else ""
    return _without_markdown(inspect.cleandoc(owner.__doc__ or "").partition("\n\n")[0])


def _preset_lines(text: str, group: str) -> Iterator[str]:
    """Yield a line for each setting of other groups that an option's file sets."""
    content = OmegaConf.create(text) if "@package _global_" in text else OmegaConf.create()
    for name, node in content.items():
        if name not in ("defaults", group):
            values = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
            if isinstance(values, dict):
                yield from (f"  it sets {name!s}.{key!s}={as_typed(value)}" for key, value in values.items())
            else:
                yield f"  it sets {name!s}={as_typed(values)}"


def _options(group: str) -> list[str]:
    return sorted({*declared().get(group, ()), *yaml_texts().get(group, ())} - {""})


def _fields(*owners: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the settings of dataclasses by name, without ``_target_`` and a strategy's name."""
    fields = {field.name: field for owner in owners for field in dataclasses.fields(owner) if field.name != "_target_"}
    if any(issubclass(owner, config.StrategyConfig) for owner in owners):
        del fields["name"]
    return fields


def _full_key(group: str, name: str) -> str:
    return name if group == JOB else f"{group}.{name}"


def _without_markdown(text: str) -> str:
    """Return Markdown as plain text."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join(text.split())).replace("`", "")


def _wrapped(text: str, first: str, rest: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
