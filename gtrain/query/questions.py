"""Questions in text: ``HEAD,RELATION,?``, ``?,RELATION,TAIL`` and ``HEAD,RELATION,TAIL``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gtrain.errors import ConfigError

ASKED = "?"
_QUOTED = re.compile(r' *"((?:[^"]|"")*)"(?=,|$)')


@dataclass(frozen=True)
class Question:
    """An edge, of which at most one end is asked for.

    Attributes:
        head, tail: names; None: asked for.
        relation: its name; None: the only relation of the graph.
    """

    head: str | None
    relation: str | None
    tail: str | None

    @classmethod
    def parse(cls, text: str) -> Question:
        """Read a question: fields separated by commas; a field with a comma stands in double quotes, as in CSV.

        Quotes that do not enclose a whole field are a part of the name, and ``"?"`` in quotes is a name.

        Raises:
            ConfigError: it has another number of fields, or asks for both ends.
        """
        fields = _fields(text)
        if len(fields) not in (2, 3):
            raise ConfigError(
                f"{text!r} was given; a question has 3 fields, and this one has {len(fields)}.",
                hint="'HEAD,RELATION,?', '?,RELATION,TAIL' or 'HEAD,RELATION,TAIL'; a name with a comma in double "
                "quotes; a graph without relations has no RELATION.",
            )
        head, tail = (None if not quoted and end.strip() == ASKED else end for end, quoted in (fields[0], fields[-1]))
        if head is None and tail is None:
            raise ConfigError(
                f"{text!r} was given; it asks for both ends.", hint="give one of them: 'HEAD,RELATION,?'."
            )
        return cls(head, fields[1][0] if len(fields) == 3 else None, tail)


def _fields(text: str) -> list[tuple[str, bool]]:
    """Return the fields of a question, and whether each stood in quotes."""
    fields, at = [], -1
    while at < len(text):
        quoted = _QUOTED.match(text, at + 1)
        if quoted is not None:
            fields.append((quoted[1].replace('""', '"'), True))
            at = quoted.end()
        else:
            end = text.find(",", at + 1)
            begin, at = at + 1, len(text) if end < 0 else end
            fields.append((text[begin:at].lstrip(" "), False))
    return fields
