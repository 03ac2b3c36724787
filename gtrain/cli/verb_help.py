"""``gtrain VERB --help``: what a verb does, what follows it, and what it reads. Light: imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from gtrain import config
from gtrain.cli import explain
from gtrain.query.options import NeighborOptions, ScoreOptions

FLAGS = ("--help", "-h")
_WIDTH = 110
_OF_A_RUN = ("run", "ckpt_path")


@dataclass(frozen=True)
class VerbHelp:
    """The help of a verb.

    Attributes:
        usage: what follows ``gtrain VERB``.
        example: a command.
        page: of the documentation, below ``docs``.
        settings: keys of the configuration that are there for this verb; it reads others as well.
        options: what the verb takes as ``key=value`` if it composes no configuration: the meaning of each, or a
            dataclass that declares them.
    """

    usage: str
    example: str
    page: str
    settings: tuple[str, ...] = ()
    options: dict[str, str] | type = field(default_factory=dict)


_PICTURES = "form of the pictures beside the page: svg (the default), png or none"
_FORMAT = "text (the default) or json"
HELP = {
    "train": VerbHelp(
        "[key=value ...]", "gtrain model=sage trainer.num_nodes=4 trainer.max_epochs=20", "configuration.md",
        (*_OF_A_RUN, "seed", "report"),
    ),
    "test": VerbHelp("[key=value ...]", "gtrain test run=last", "runs.md", _OF_A_RUN),
    "predict": VerbHelp(
        "[key=value ...]", "gtrain predict run=last output=scores.parquet", "runs.md",
        (*_OF_A_RUN, "output", "format", "embeddings", "correct_and_smooth"),
    ),
    "export": VerbHelp(
        "[key=value ...]", "gtrain export run=last output=embeddings.parquet", "query.md",
        (*_OF_A_RUN, "output", "format"),
    ),
    "partition": VerbHelp(
        "[key=value ...]", "gtrain partition data=planted data.num_parts=4", "data.md",
        ("data.num_parts", "data.partitioner", "data.store"),
    ),
    "schema": VerbHelp("data=tables [key=value ...]", "gtrain schema data=tables data.nodes=papers.parquet "
                       "data.edges=cites.parquet", "tables.md", ("data.nodes", "data.edges")),
    "score": VerbHelp("run=FOLDER 'HEAD,RELATION,?' ...", "gtrain score run=last 'Marie Curie,born in,?' k=5",
                      "query.md", options=ScoreOptions),
    "neighbors": VerbHelp("run=FOLDER NAME ...", "gtrain neighbors run=last 'Marie Curie' k=5", "query.md",
                          options=NeighborOptions),
    "plan": VerbHelp(
        "[key=value ...]", "gtrain plan experiment=papers100m trainer.num_nodes=32", "plan.md",
        ("plan.machine", "plan.least", "explain"),
    ),
    "serve": VerbHelp(
        "role=ROLE [key=value ...]",
        "gtrain serve role=parameter cluster.rendezvous=tcp://host:29500 cluster.key_file=job.key",
        "launchers.md", ("role", "cluster.rendezvous", "cluster.key_file"),
    ),
    "key": VerbHelp("cluster.key_file=FILE", "gtrain key cluster.key_file=job.key", "launchers.md",
                    ("cluster.key_file",)),
    "explain": VerbHelp("[KEY, GROUP=OPTION or GROUP ...]", "gtrain explain data.split strategy=single trainer",
                        "configuration.md"),
    "runs": VerbHelp(
        "[FOLDER]", "gtrain runs limit=20", "runs.md",
        options={"limit": "most rows of the table (100)", "format": "table (the default) or json"},
    ),
    "report": VerbHelp(
        "RUN ...", "gtrain report run=last output=report.html", "report.md",
        options={"output": "file of the page; by default report.html in the folder of the run", "files": _PICTURES},
    ),
    "trace": VerbHelp(
        "RUN", "gtrain trace run=last", "report.md",
        options={"output": "file of the trace; by default trace.json in the folder of the run",
                 "operators": "true (the default) or false: with torch's operators"},
    ),
    "watch": VerbHelp("RUN", "gtrain watch run=last", "report.md"),
    "doctor": VerbHelp(
        "[key=value ...]", "gtrain doctor trainer.num_nodes=4", "launchers.md",
        options={"format": _FORMAT, "calibrate": "true: measure the constants of gtrain plan, in about a minute",
                 "strategy, trainer.num_nodes, trainer.devices": "of the job whose needs are compared with the machine",
                 "cluster.rendezvous, cluster.key_file": "of a job whose ranks run this command too: the bandwidth "
                 "between them is measured"},
    ),
}  # fmt: skip
"""By verb."""


def requested(arguments: Sequence[str]) -> str | None:
    """Return the verb whose help the command line asks for; None: none, or with settings, which Hydra composes."""
    verb = next((argument for argument in arguments if argument in config.VERBS), None)
    if verb is None or not any(argument in FLAGS for argument in arguments):
        return None
    others = [argument for argument in arguments if argument not in (*FLAGS, verb)]
    return None if others and HELP[verb].settings else verb


def text_of(verb: str) -> str:
    """Return the help of a verb."""
    described = HELP[verb]
    lines = [f"gtrain {verb} {described.usage}", "", *textwrap.wrap(_sentence(config.VERBS[verb]), _WIDTH), ""]
    if isinstance(described.options, type):
        lines += [explain.settings_of(described.options), ""]
    elif described.options:
        for name, meaning in described.options.items():
            lines += textwrap.wrap(f"{name}: {meaning}", _WIDTH, initial_indent="  ", subsequent_indent="      ")
        lines.append("")
    if described.settings:
        lines += [explain.explain(key) for key in described.settings]
        lines += ["", f"gtrain {verb} --cfg job prints all settings, gtrain explain KEY explains one.", ""]
    return "\n".join([*lines, f"Example: {described.example}", f"Documentation: docs/{described.page}"])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
