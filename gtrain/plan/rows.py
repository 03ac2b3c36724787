"""The rows of the table: every strategy and mode that serves the model, with its estimate and whether it fits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtrain import backends, config
from gtrain.data.module import GraphDataModule
from gtrain.errors import ConfigError, GtrainError
from gtrain.launch import launchers
from gtrain.plan.compose import for_strategy, settings_text
from gtrain.plan.estimate import MEMORY, SERVER_MEMORY, Estimate, NotEstimated, PlannedRun
from gtrain.plan.machine import Machine, load, this_machine
from gtrain.plan.workload import Workload, describe
from gtrain.run.sketch import ModelSketch
from gtrain.run.task import data_module

MOST_MACHINES = 1 << 16
NO_FORMULAS = "its package has no formulas"
"""Why a backend without a planner is not estimated."""


@dataclass(frozen=True)
class Row:
    """One strategy and mode.

    Attributes:
        strategy: its name.
        variant: the settings of ``strategy`` that distinguish it from the strategy's other rows.
        run: the run; None if its configuration is refused.
        estimate: what it costs; None if nothing is known.
        refusal: why there is no estimate, a clause; empty if there is one.
        machines: the machines that ``plan.least`` found; None: not searched, or no number does.
    """

    strategy: str
    variant: Mapping[str, Any]
    run: PlannedRun | None = None
    estimate: Estimate | None = None
    refusal: str = ""
    machines: int | None = None

    @property
    def title(self) -> str:
        """The settings that choose this row, as a user types them."""
        return " ".join((f"strategy={self.strategy}", *settings_text(self.strategy, self.variant)))

    @property
    def seconds(self) -> float:
        """Seconds of an epoch."""
        assert self.estimate is not None
        return self.estimate.seconds

    @property
    def race_settings(self) -> Mapping[str, Any]:
        """The settings by which it validates as other strategies do."""
        settings: Mapping[str, Any] = backends.get(self.strategy).load_planner().exact_validation
        return settings

    @property
    def machine_bytes(self) -> float:
        """Memory of the ranks and servers of the machine that has most."""
        assert self.run is not None and self.estimate is not None
        ranks, servers = self.run.ranks_per_machine, self.run.servers_per_machine
        return ranks * self.estimate.total(MEMORY) + servers * self.estimate.total(SERVER_MEMORY)

    @property
    def fits(self) -> bool:
        """Whether its processes fit into the memory of a machine."""
        return self.estimate is not None and self.run is not None and self.machine_bytes <= self.run.machine.memory


@dataclass
class Plan:
    """All rows, and which of them is recommended.

    Attributes:
        rows: the rows, those with an estimate first.
        not_served: the strategies without a row, with the reason, a clause.
        workload: what is trained.
        machine: a machine.
        num_machines: how many there are.
    """

    rows: list[Row]
    not_served: dict[str, str]
    workload: Workload
    machine: Machine
    num_machines: int

    @cached_property
    def ranking(self) -> list[Row]:
        """The rows that fit, the shortest epoch first."""
        return sorted((row for row in self.rows if row.fits), key=lambda row: row.seconds)

    @property
    def recommended(self) -> Row | None:
        """The row with the shortest epoch among those that fit; None if none does."""
        return self.ranking[0] if self.ranking else None

    @property
    def reason(self) -> str:
        """Why the recommended row is recommended, or why none is: one sentence."""
        estimated = [row for row in self.rows if row.estimate is not None]
        if not self.ranking:
            if not estimated:
                return "No strategy has an estimate."
            least = min(estimated, key=lambda row: row.machine_bytes)
            needed, there = (f"{value / 2**30:.1f} GiB" for value in (least.machine_bytes, self.machine.memory))
            return f"Nothing fits: {least.title} needs least, {needed} of the {there} of a machine."
        best, others = self.ranking[0], [row for row in self.ranking[1:] if row.strategy != self.ranking[0].strategy]
        text = f"{best.title} has the shortest epoch of those that fit, {best.seconds:.3g} s"
        if others:
            text += f" (then {others[0].title}, {others[0].seconds:.3g} s)"
        if killed := [row.title for row in estimated if not row.fits]:
            text += f"; {', '.join(killed)} would exceed the memory"
        assert best.estimate is not None
        return f"{text}; {best.estimate.limit} limits it."

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        work = self.workload
        return {
            "machine": self.machine.as_dict(),
            "machines": self.num_machines,
            "data": {
                "nodes": work.num_nodes,
                "edges": work.num_edges,
                "seeds": work.num_seeds,
                "features": work.num_features,
                "counted": work.store is not None,
            },
            "rows": [_row_dict(row) for row in self.rows],
            "not_served": self.not_served,
            "recommended": None if self.recommended is None else self.recommended.title,
            "reason": self.reason,
        }


def _row_dict(row: Row) -> dict[str, Any]:
    known = {"ranks": row.run.ranks, "servers": row.run.servers} if row.run is not None else {}
    estimate = {} if row.estimate is None else {**row.estimate.as_dict(), "machine_memory_bytes": row.machine_bytes}
    return {
        "strategy": row.strategy,
        "variant": dict(row.variant),
        **known,
        "fits": row.fits,
        "refusal": row.refusal or None,
        "least_machines": row.machines,
        **estimate,
    }


@dataclass
class Planning:
    """Makes the plan of a composed configuration.

    Args:
        cfg: the composed configuration; its strategy is one of the candidates, or ``auto``.
        overrides: the settings of the command line, from which each strategy's configuration is composed.
        experiment: the experiment of the job.
        names: strategies to plan; None: all that are installed.
    """

    cfg: DictConfig
    overrides: Sequence[str]
    experiment: str | None = None
    names: Sequence[str] | None = None
    _refused: dict[str, str] = field(default_factory=dict)

    def make(self) -> Plan:
        """Return the plan. The first store that a candidate needs is prepared, unless one exists.

        Raises:
            GtrainError: the data cannot be read, or have no counts.
        """
        gc.freeze()  # composing collects garbage often, and would traverse all imported objects each time
        candidates = dict(self._candidates())
        if not candidates:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._refused.items())
            raise ConfigError(f"no strategy accepts these settings: {reasons}", hint="leave out some of them.")
        settings = self.cfg.plan
        machine = this_machine() if settings.machine is None else load(settings.machine)
        if settings.memory is not None:
            machine.memory = min(machine.memory, settings.memory)
        modules = {name: data_module(each, _ranks(each)) for name, each in candidates.items()}
        first = self._counted(candidates, modules)
        sketch = ModelSketch(candidates[first], modules[first])
        workload = describe(candidates[first], modules[first], sketch.model, sketch.traits.kind, settings.cut)
        workload.stores = [module.open_store() for module in modules.values() if module.can_open_store]
        rows: list[Row] = []
        not_served = dict(self._refused)
        for name, each in candidates.items():
            if (reason := sketch.traits.refusal(backends.get(name).serves)) is not None:
                not_served[name] = reason
                continue
            try:
                rows += self._rows(name, each, workload, machine)
            except ConfigError as error:  # of its defaults and this number of machines
                if name == str(self.cfg.strategy.name):
                    raise
                not_served[name] = error.message.rstrip(".")
        machines = max((row.run.num_machines for row in rows if row.run is not None), default=1)
        rows.sort(key=lambda row: row.estimate is None)
        return Plan(rows, not_served, workload, machine, machines)

    def _candidates(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the resolved configuration of each strategy that accepts the settings."""
        own = str(self.cfg.strategy.name)
        names = list(self.names or backends.usable())
        # The strategy of the command line comes first.
        for name in sorted(names, key=lambda name: name != own):
            try:
                cfg, _, _ = for_strategy(self.cfg, name, self.overrides, self.experiment)
                config.validate(cfg)
                yield name, config.plain(cfg)
            except GtrainError as error:
                self._refused[name] = error.message.rstrip(".")

    def _counted(self, candidates: Mapping[str, dict[str, Any]], modules: Mapping[str, GraphDataModule]) -> str:
        """Return the strategy whose store is counted; prepare it if none exists."""
        stored = [name for name, module in modules.items() if module.can_open_store]
        partitioned = [name for name in stored if modules[name].num_parts > 1]
        if stored:
            return (partitioned or stored)[0]
        names = list(modules)
        if "num_edges" in (modules[names[0]].outline or {}):
            return names[0]
        first = next((n for n in names if backends.get(n).serves.part_per_rank and _ranks(candidates[n]) > 1), names[0])
        if not self.cfg.plan.prepare:
            raise ConfigError(
                "plan.prepare=false was set; the data have no store yet, so that nothing can be counted.",
                hint="leave out plan.prepare, run gtrain partition first, or give counts with data=counts.",
            )
        modules[first].prepare_data()
        return first

    def _rows(self, name: str, each: dict[str, Any], workload: Workload, machine: Machine) -> Iterator[Row]:
        backend = backends.get(name)
        planner = backend.load_planner()
        if planner is None:
            yield Row(name, {}, refusal=NO_FORMULAS)
            return
        for variant in planner.variants(each):
            settings = copy.deepcopy(each)
            settings["strategy"] |= variant
            run = planned_run(name, settings, workload, machine)
            try:
                estimate = planner.estimate(run)
            except NotEstimated as error:
                yield Row(name, variant, run, refusal=str(error))
                continue
            row = Row(name, variant, run, estimate)
            yield least_machines(row) if self.cfg.plan.least else row


def planned_run(name: str, settings: dict[str, Any], workload: Workload, machine: Machine) -> PlannedRun:
    """Return a run of a strategy on machines like ``machine``."""
    roles = backends.get(name).plan(OmegaConf.create(settings))
    servers = sum(role.count for role in roles if role.name != backends.WORKER)
    nodes = int(settings["trainer"]["num_nodes"])
    # The local launcher simulates machines on this one; plan.machine describes real ones.
    simulated = settings["plan"]["machine"] is None and launchers.resolve(settings["cluster"]["kind"]).name == "local"
    count = 1 if simulated else nodes if machine.count is None else min(machine.count, nodes)
    return PlannedRun(settings, workload, machine, count, servers)


def least_machines(row: Row) -> Row:
    """Return the row and the smallest number of machines on which it fits: one that is simulated counts as one."""
    assert row.run is not None
    fixed = backends.get(row.strategy).serves.limits
    limit = 1 if "trainer.num_nodes" in fixed else MOST_MACHINES
    low, high = 0, 1
    before, tried = None, _on_machines(row, 1)
    while (tried is None or not tried.fits) and high < limit and not _cannot_fit(before, tried):
        low, high = high, 2 * high
        before, tried = tried, _on_machines(row, high)
    if tried is None or not tried.fits:
        return row
    while high - low > 1:
        middle = (low + high) // 2
        better = _on_machines(row, middle)
        low, high = (low, middle) if better is not None and better.fits else (middle, high)
    return replace(row, machines=high)


def _on_machines(row: Row, machines: int) -> Row | None:
    """Return the row on another number of machines; None if that is refused, or has no estimate."""
    assert row.run is not None
    settings = copy.deepcopy(dict(row.run.config))
    settings["trainer"]["num_nodes"] = machines
    try:
        run = planned_run(row.strategy, settings, row.run.workload, row.run.machine)
        run = replace(run, num_machines=machines)
        return Row(row.strategy, row.variant, run, backends.get(row.strategy).load_planner().estimate(run))
    except (ConfigError, NotEstimated):
        return None


def _cannot_fit(fewer: Row | None, more: Row | None) -> bool:
    """Whether what a machine keeps of its memory when there are more machines is too much for it already."""
    if fewer is None or more is None or more.run is None or fewer.estimate is None or more.estimate is None:
        return False
    known = {(term.quantity, term.name): term.value for term in fewer.estimate.terms}
    fixed = [term for term in more.estimate.terms if known.get((term.quantity, term.name)) == term.value]
    kept = replace(more, estimate=Estimate(terms=fixed))
    return not kept.fits


def _ranks(settings: Mapping[str, Any]) -> int:
    return int(settings["trainer"]["num_nodes"]) * int(settings["trainer"]["devices"])
