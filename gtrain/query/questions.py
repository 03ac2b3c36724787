"""Questions in text: ``HEAD,RELATION,?``, ``?,RELATION,TAIL`` and ``HEAD,RELATION,TAIL``."""

from __future__ import annotations

import csv
from dataclasses import dataclass

from gtrain.errors import ConfigError

ASKED = "?"


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

        Raises:
            ConfigError: it has another number of fields, or asks for both ends.
        """
        fields = next(csv.reader([text], skipinitialspace=True), [])
        if len(fields) not in (2, 3):
            raise ConfigError(
                f"{text!r} was given; a question has 3 fields, and this one has {len(fields)}.",
                hint="'HEAD,RELATION,?', '?,RELATION,TAIL' or 'HEAD,RELATION,TAIL'; a name with a comma in double "
                "quotes; a graph without relations has no RELATION.",
            )
        head, tail = (None if end.strip() == ASKED else end for end in (fields[0], fields[-1]))
        if head is None and tail is None:
            raise ConfigError(
                f"{text!r} was given; it asks for both ends.", hint="give one of them: 'HEAD,RELATION,?'."
            )
        return cls(head, fields[1] if len(fields) == 3 else None, tail)
