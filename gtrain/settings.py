"""One declaration for each setting: a dataclass field, made by :func:`setting`, with its meaning and its limits.

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
    above: float | None = None,
    below: float | None = None,
    unit: str = "",
    type: str = "",
    follows: str | None = None,
    hint: str = "",
) -> Any:
    """A dataclass field that declares a setting.

    Args:
        default: its default; a list or dictionary is copied for each object.
        help: its meaning, a clause without a full stop. Markdown: code in back quotes, links relative to ``docs/``.
        words: its allowed values, with the meaning of each or without.
        least: its least value.
        above: what it must be greater than; infinity is refused then.
        below: what it must be less than.
        unit: of its value, such as ``seconds``.
        type: how ``gtrain explain`` names its type, where the annotation is ``Any``.
        follows: interpolation that is its default in a composed configuration, such as ``${seed}``.
        hint: advice of an error; empty: the allowed values, or the default.
    """
    declared = {
        "help": help,
        "words": words,
        "least": least,
        "above": above,
        "below": below,
        "unit": unit,
        "type": type,
        "follows": follows,
        "hint": hint,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=declared)
    return dataclasses.field(default=default, metadata=declared)


def changed(config: type, name: str, default: Any, **declared: Any) -> Any:
    """The field ``name`` of a dataclass with another default, and what else is to differ from its declaration."""
    (field,) = (field for field in dataclasses.fields(config) if field.name == name)
    declared = {**field.metadata, **declared}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=declared)
    return dataclasses.field(default=default, metadata=declared)


T = TypeVar("T")
S = TypeVar("S")


class Settings:
    """Base of dataclasses of settings, which check their words and limits when they are made.

    Attributes:
        group: the configuration group that they are, which messages name: ``strategy`` of ``strategy.prefetch``.
    """

    group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: what was set, what is allowed.
        """
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            check(self.group, field, getattr(self, field.name))


def check(group: str, field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a value that is not among a setting's words, or beyond its limits; None is left to the field's type.

    Raises:
        ConfigError: what was set, what is allowed.
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
    least, above, below = declared["least"], declared["above"], declared["below"]
    return (
        (least is None or value >= least)
        and (above is None or above < value < math.inf)
        and (below is None or value < below)
    )


def choices(words: Mapping[Any, str] | Sequence[Any]) -> str:
    """Allowed words as a hint lists them."""
    if isinstance(words, Mapping):
        return "; ".join(f"{as_typed(word)}: {text}" for word, text in words.items())
    return f"one of {', '.join(map(as_typed, words))}"


def limits(field: dataclasses.Field[Any]) -> str:
    """The limits of a number in words, such as ``0 or more batches``; empty without limits."""
    least, above, below, unit = (field.metadata.get(key) for key in ("least", "above", "below", "unit"))
    parts = []
    if above is not None:
        parts.append(f"above {above:g}" if unit else f"a number above {above:g}")
    if least is not None:
        parts.append(f"{least:g} or more" if unit else f"at least {least:g}")
    if below is not None:
        parts.append(f"below {below:g}")
    text = " and ".join(parts)
    return f"{text} {unit}" if text and unit else text


def as_typed(value: Any) -> str:
    """A value as it is written on a command line or in YAML."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value).replace(" ", "") if isinstance(value, (list, tuple, Mapping)) else str(value)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a setting in a composed configuration: the interpolation that it follows, if any."""
    if field.metadata.get("follows") is not None:
        return field.metadata["follows"]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def defaults(config: type) -> dict[str, Any]:
    """The defaults of a dataclass's settings in a composed configuration, by name."""
    return {field.name: default_of(field) for field in dataclasses.fields(config)}


def schema(config: type, flags: dict[str, bool] | None = None) -> DictConfig:
    """A dataclass as a typed node of a composed configuration, with the interpolations that settings follow."""
    node: DictConfig = OmegaConf.structured(config, flags=flags)
    for field in dataclasses.fields(config):
        if field.metadata.get("follows") is not None:
            node[field.name] = default_of(field)
    return node


# ------------------------------------------------------------------------------------------------------- keywords


def take(config: type, owner: str, given: dict[str, Any], also: Iterable[str] = ()) -> dict[str, Any]:
    """Take out of keywords those that are settings of a dataclass.

    Args:
        config: the dataclass.
        owner: whose keywords they are, for messages.
        given: the keywords; those taken are removed.
        also: keywords that are no settings and stay.

    Raises:
        ConfigError: a keyword is neither; lists the settings.
    """
    names = [field.name for field in dataclasses.fields(config)]
    for name in given:
        if name not in names and name not in also:
            close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
            listed = f"the settings are {', '.join(one for one in names if one not in HIDDEN)}."
            raise ConfigError(
                f"{owner}({name}={given[name]!r}) was called; it has no such setting.",
                hint=f"did you mean {' or '.join(close)}? {listed}" if close else listed,
            )
    return {name: given.pop(name) for name in names if name in given}


def made(config: type[S], owner: str, settings: S | None, keywords: dict[str, Any]) -> S:
    """Settings of keywords, and of an object with the others.

    Args:
        config: the dataclass that declares them.
        owner: whose keywords they are, for messages.
        settings: the others; None: the defaults.
        keywords: settings by name.

    Raises:
        ConfigError: a setting is unknown, not allowed, or missing.
    """
    given = take(config, owner, dict(keywords))
    result = config(**given) if settings is None else dataclasses.replace(settings, **given)  # type: ignore[type-var]
    missing = [name for name, value in vars(result).items() if value == MISSING and name != "_target_"]
    if missing:
        raise ConfigError(f"{owner}() was called without {missing[0]}.", hint=f"give it {', '.join(missing)}.")
    return result


def part(config: type[T], settings: object) -> T:
    """An object of a dataclass whose fields all are settings of another."""
    return config(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(config)})  # type: ignore[arg-type]


HIDDEN = ("_target_", "name")
"""Fields that a configuration names its option by, and that are no keywords."""


def parameters(
    config: type, form: Any = inspect.Parameter.KEYWORD_ONLY, hidden: Sequence[str] = HIDDEN
) -> Iterator[inspect.Parameter]:
    """The settings of a dataclass as parameters of a function, for ``help()`` and editors."""
    for field in dataclasses.fields(config):
        if field.name not in hidden:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if default == MISSING:
                default = inspect.Parameter.empty
            yield inspect.Parameter(field.name, form, default=default, annotation=field.type)


def signature_of(cls: type, declared: Callable[[], Iterable[inspect.Parameter]], *, own: bool) -> inspect.Signature:
    """What ``help()`` shows of a class that takes settings as keywords.

    Args:
        cls: the class.
        declared: its parameters, where its settings are its dataclass's.
        own: whether that is so although the class has an ``__init__``, which passes keywords on.
    """
    if "__init__" in vars(cls) and not own:  # written by hand
        return inspect.Signature(list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:])
    return inspect.Signature(list(declared()))
