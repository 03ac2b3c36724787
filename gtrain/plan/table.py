"""The table of a plan, and its formulas, for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gtrain.console import table_console
from gtrain.plan.estimate import DISK, MEMORY, SENT, SERVER_MEMORY, UNITS, Term
from gtrain.plan.rows import Plan, Row
from gtrain.units import size

_FEW = 0.005
"""Terms below this share of their quantity are left out of the formulas."""


def show(plan: Plan, *, explain: bool = False, console: Console | None = None) -> None:
    """Print a plan.

    Args:
        plan: the plan.
        explain: whether the formulas follow, with the numbers put in.
        console: where it is printed; None: standard output.
    """
    console = console or table_console()
    console.print(_table(plan), soft_wrap=False)
    lines = [_data_line(plan)]
    lines += [f"{row.title}: no estimate: {row.refusal}" for row in plan.rows if row.estimate is None]
    lines += [f"strategy={name} is left out: {reason}" for name, reason in plan.not_served.items()]
    assumed = dict.fromkeys(text for row in plan.rows if row.estimate for text in row.estimate.assumptions)
    for line in (*lines, *(f"assumed: {text}" for text in assumed), plan.reason):
        console.print(Text(line), soft_wrap=True)  # not markup: settings may have brackets
    for row in plan.rows if explain else ():
        if row.estimate is not None:
            _explain(row, console)


def _table(plan: Plan) -> Table:
    rows = [row for row in plan.rows if row.estimate is not None]
    least, servers = any(row.machines for row in rows), any(row.run and row.run.servers for row in rows)
    disks = any(row.estimate and row.estimate.total(DISK) for row in rows)
    table = Table(title="for the largest rank, and an epoch", title_justify="left")
    for heading in ("", "settings"):
        table.add_column(heading, no_wrap=True)
    columns = ["ranks", "memory", *["of a server"] * servers, "sends", *["disk"] * disks, "seconds", "limit"]
    for heading in [*columns, *["machines"] * least]:
        # Numbers are not cut as long as what limits a row can take several lines instead.
        table.add_column(heading, justify="left" if heading == "limit" else "right", no_wrap=heading != "limit")
    for row in rows:
        estimate, run = row.estimate, row.run
        assert estimate is not None and run is not None
        mark = "*" if row is plan.recommended else ""
        cells = [str(run.ranks), size(estimate.total(MEMORY))]
        cells += [size(estimate.total(SERVER_MEMORY)) if run.servers else "-"] * servers
        cells += [size(estimate.total(SENT)), *[size(estimate.total(DISK))] * disks, f"{estimate.seconds:.3g}"]
        limit = estimate.limit if row.fits else "does not fit"
        machines = [str(row.machines or "-")] * least
        table.add_row(mark, Text(row.title), *cells, limit, *machines, style=None if row.fits else "dim")
    return table


def _data_line(plan: Plan) -> str:
    work, machine = plan.workload, plan.machine
    counted = "counted" if work.store is not None else "given by counts"
    machines = f"{plan.num_machines} x " if plan.num_machines > 1 else ""
    return (
        f"data ({counted}): {work.num_nodes:,.0f} nodes, {work.num_edges:,.0f} edges, {work.num_seeds:,.0f} seeds. "
        f"{machines}{machine.name}: {machine.cores} cores of {machine.flops / 1e9:.3g} GFLOP/s, "
        f"{size(machine.memory)}, network {size(machine.network)}/s."
    )


def _explain(row: Row, console: Console) -> None:
    """Print the terms of a row, by quantity."""
    assert row.estimate is not None
    console.print(Text(f"\n{row.title}", "bold"))
    for quantity, unit in UNITS.items():
        terms = [term for term in row.estimate.terms if term.quantity == quantity]
        total = row.estimate.total(quantity)
        if not terms or not total:
            continue
        console.print(Text(f"  {quantity}: {_value(total, unit)}"))
        for term in terms:
            if term.value >= _FEW * total:
                console.print(Text(f"    {_value(term.value, unit):>10}  {term.name}: {_put_in(term)}"))


def _put_in(term: Term) -> str:
    numbers = ", ".join(f"{name} = {_number(value)}" for name, value in term.numbers.items())
    return f"{term.formula}, where {numbers}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"


def _value(value: float, unit: str) -> str:
    return size(value) if unit == "bytes" else f"{value:.3g} s"
