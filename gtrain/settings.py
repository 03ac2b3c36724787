"""Settings as dataclass fields, the only declaration of each setting: :func:`setting` adds its meaning and limits.

The dataclass checks its values. Hydra composes it, strategies and data modules take its fields as keywords, and
``gtrain explain`` and the tables of the documentation print them. Light: imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf

from gtrain.errors import ConfigError


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    words: Mapping[Any, str] | Sequence[Any] | None = None,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    unit: str = "",
    type: str = "",
    follows: str | None = None,
    path: bool = False,
    hint: str = "",
) -> Any:
    """Return a dataclass field that declares a setting.

    Args:
        default: the default; a list or dictionary is copied for each object.
        help: the meaning, a clause without a full stop. Markdown: code in back quotes, links relative to ``docs/``.
        words: the allowed values, with or without the meaning of each.
        least: the minimum.
        most: the maximum.
        above: the exclusive lower bound; it also excludes infinity.
        below: the exclusive upper bound; infinity: any finite number.
        unit: the unit of the value, such as ``seconds``.
        type: the type that ``gtrain explain`` prints if the annotation is ``Any``.
        follows: the interpolation that is the default in a composed configuration, such as ``${seed}``.
        path: whether the value names files that a run reads, relative to the folder in which it starts.
        hint: the hint of an error; empty: the allowed values, or the default.
    """
    declared = {
        "help": help,
        "words": words,
        "least": least,
        "most": most,
        "above": above,
        "below": below,
        "unit": unit,
        "type": type,
        "follows": follows,
        "path": path,
        "hint": hint,
    }
    return _field(default, declared)


def changed(config: type, name: str, default: Any, **declared: Any) -> Any:
    """Return a copy of a dataclass's field with another default and other arguments of :func:`setting`."""
    (field,) = (field for field in dataclasses.fields(config) if field.name == name)
    return _field(default, {**field.metadata, **declared})


def _field(default: Any, metadata: dict[str, Any]) -> Any:
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


T = TypeVar("T")
S = TypeVar("S")


class Settings:
    """Base of dataclasses of settings, whose constructor checks allowed words and limits.

    Attributes:
        group: the configuration group, for messages: ``strategy`` of ``strategy.prefetch``.
    """

    group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is not allowed; lists the allowed values.
        """
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            check(self.group, field, getattr(self, field.name))


def check(group: str, field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a value that is not among a setting's words, or outside its limits; every setting may be None here.

    Raises:
        ConfigError: the value is not allowed; lists the allowed values.
    """
    declared, key = field.metadata, f"{group}.{field.name}" if group else field.name
    if value is None or value == MISSING or not declared:
        return
    if (words := declared["words"]) is not None and as_typed(value) not in map(as_typed, words):
        raise ConfigError(f"{key}={value} was set.", hint=declared["hint"] or f"choose {choices(words)}.")
    if words is None and not _within(declared, value):
        hint = declared["hint"] or f"{as_typed(field.default)} is the default."
        finite = "" if not isinstance(value, float) or math.isfinite(value) else ", and finite"
        raise ConfigError(f"{key}={value} was set; it must be {limits(field)}{finite}.", hint=hint)


def _within(declared: Mapping[str, Any], value: Any) -> bool:
    least, most, above, below = (declared[key] for key in ("least", "most", "above", "below"))
    return (
        (least is None or value >= least)
        and (most is None or value <= most)
        and (above is None or above < value < math.inf)
        and (below is None or value < below)
    )


def choices(words: Mapping[Any, str] | Sequence[Any]) -> str:
    """Return the list of allowed words for a hint."""
    if isinstance(words, Mapping):
        return "; ".join(f"{as_typed(word)}: {text}" for word, text in words.items())
    return f"one of {', '.join(map(as_typed, words))}"


def limits(field: dataclasses.Field[Any]) -> str:
    """Return the limits of a number in words, such as ``0 or more batches``; empty without limits."""
    least, most, above, below, unit = (field.metadata.get(key) for key in ("least", "most", "above", "below", "unit"))
    parts = []
    if above is not None:
        parts.append(f"above {above}" if unit else f"a number above {above}")
    if least is not None:
        parts.append(f"{least} or more" if unit else f"at least {least}")
    if most is not None:
        parts.append(f"at most {most}")
    if below is not None and below < math.inf:
        parts.append(f"below {below}")
    text = " and ".join(parts)
    return f"{text} {unit}" if text and unit else text


def as_typed(value: Any) -> str:
    """Return a value as users type it on a command line or in YAML."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value).replace(" ", "") if isinstance(value, (list, tuple, Mapping)) else str(value)


def nested(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a node of a configuration, and then all nodes inside of it, each with its key: ``data.files[0]``."""
    yield key, node
    for name, value in node.items() if isinstance(node, dict) else ():
        yield from nested(value, f"{key}.{name}" if key else str(name))
    for index, value in enumerate(node if isinstance(node, (list, tuple)) else ()):
        yield from nested(value, f"{key}[{index}]")


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a setting in a composed configuration, which may be an interpolation."""
    if field.metadata.get("follows") is not None:
        return field.metadata["follows"]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def defaults(config: type) -> dict[str, Any]:
    """Return the defaults of a dataclass's settings in a composed configuration, by name."""
    return {field.name: default_of(field) for field in dataclasses.fields(config)}


def schema(config: type, flags: dict[str, bool] | None = None) -> DictConfig:
    """Return a dataclass as a typed node of a composed configuration, with interpolations as defaults."""
    node: DictConfig = OmegaConf.structured(config, flags=flags)
    for field in dataclasses.fields(config):
        if field.metadata.get("follows") is not None:
            node[field.name] = default_of(field)
    return node


# ------------------------------------------------------------------------------------------------------- keywords


def pop_settings(config: type, owner: str, keywords: dict[str, Any], also: Iterable[str] = ()) -> dict[str, Any]:
    """Remove the settings of a dataclass from keyword arguments, and return them.

    Args:
        config: the dataclass.
        owner: the function or class that was called, for messages.
        keywords: the keyword arguments; changed in place.
        also: further keywords that are allowed and stay.

    Raises:
        ConfigError: a keyword is unknown; lists the settings.
    """
    names = names_of(config)
    for name in keywords:
        if name not in names and name not in also:
            close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
            available = f"the settings are {', '.join(name for name in names if name not in HIDDEN)}."
            raise ConfigError(
                f"{owner}({name}={keywords[name]!r}) was called; it has no such setting.",
                hint=f"did you mean {' or '.join(close)}? {available}" if close else available,
            )
    return {name: keywords.pop(name) for name in names if name in keywords}


def build_settings(config: type[S], owner: str, settings: S | None, keywords: dict[str, Any]) -> S:
    """Return settings from keyword arguments, and from an object for the others.

    Args:
        config: the dataclass that declares the settings.
        owner: the function or class that was called, for messages.
        settings: the values of the other settings; None: the defaults.
        keywords: settings by name.

    Raises:
        ConfigError: a setting is unknown, not allowed, or missing.
    """
    values = pop_settings(config, owner, dict(keywords))
    result = config(**values) if settings is None else dataclasses.replace(settings, **values)  # type: ignore[type-var]
    missing = [name for name, value in vars(result).items() if value == MISSING and name != "_target_"]
    if missing:
        raise ConfigError(f"{owner}() was called without {missing[0]}.", hint=f"give it {', '.join(missing)}.")
    return result


def part(config: type[T], settings: object) -> T:
    """Return an object of a dataclass whose fields are all fields of ``settings``."""
    return config(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(config)})  # type: ignore[arg-type]


def names_of(config: type) -> list[str]:
    """Return the names of a dataclass's settings, in the order of declaration."""
    return [field.name for field in dataclasses.fields(config)]


HIDDEN = ("_target_", "name")
"""Fields that identify the option of a configuration group; they are not keyword arguments."""


def parameters(
    config: type, form: Any = inspect.Parameter.KEYWORD_ONLY, hidden: Sequence[str] = HIDDEN
) -> Iterator[inspect.Parameter]:
    """Yield the settings of a dataclass as parameters of a function, for ``help()`` and editors."""
    for field in dataclasses.fields(config):
        if field.name not in hidden:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            default = inspect.Parameter.empty if default == MISSING else default
            yield inspect.Parameter(field.name, form, default=default, annotation=field.type)


def signature_of(cls: type, declared: Callable[[], Iterable[inspect.Parameter]], *, own: bool) -> inspect.Signature:
    """Return the signature that ``help()`` shows for a class with settings as keyword arguments.

    Args:
        cls: the class.
        declared: returns the parameters from the class's dataclass of settings.
        own: whether to use ``declared`` even if the class defines ``__init__``, which forwards its keywords.
    """
    if "__init__" in vars(cls) and not own:
        return inspect.Signature(list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:])
    return inspect.Signature(list(declared()))
