"""``gtrain plan``: makes the plan of the settings, prints it and writes it to the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from gtrain.launch import launchers
from gtrain.launch.templates import keep_templates_in_memory
from gtrain.plan import table
from gtrain.plan.rows import Plan, Planning

FILE = "plan.json"


def run(cfg: DictConfig, overrides: Sequence[str], experiment: str | None = None) -> None:
    """Print the table, or the same as JSON.

    Args:
        cfg: the composed configuration.
        overrides: the overrides of the command line.
        experiment: the experiment of the job.

    Raises:
        GtrainError: the settings are wrong, or the data cannot be read.
    """
    if not launchers.is_first():
        return
    keep_templates_in_memory()
    plan, content = make(cfg, overrides, experiment)
    if cfg.plan.format == "json":
        print(content)
        return
    table.show(plan, explain=cfg.explain)


def make(cfg: DictConfig, overrides: Sequence[str], experiment: str | None = None) -> tuple[Plan, str]:
    """Make a plan and write it to the run's folder; also return it as JSON. Arguments and errors as for :func:`run`."""
    plan = Planning(cfg, overrides, experiment).make()
    content = json.dumps(plan.as_dict(), indent=1)
    Path(cfg.paths.run, FILE).write_text(content + "\n")
    return plan, content
