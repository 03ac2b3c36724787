"""What a step costs on the wire, and the choice of the cheapest way."""

from __future__ import annotations

import pytest

from gtrain.errors import ConfigError
from gtrain_ps.costs import Load, Plan, allowed_plans, cheapest, cost_table, grid_shapes


def load(rows: int, nonzeros: int) -> Load:
    return Load(rows * nonzeros, rows * nonzeros * 0.6, rows)


@pytest.mark.parametrize(
    ("plan", "nbytes"),
    [
        (Plan("ship", 2, 1), 8 * 512 * 75 + 2 * 512 * 2 + 8 * 2 * 512 * 52),
        (Plan("ship", 1, 2), 8 * 512 * 75 * 2 + 2 * 512 * 2 + 8 * 512 * 52),
        (Plan("ship", 2, 2), 8 * 512 * 75 * 2 + 2 * 512 * 4 + 8 * 2 * 512 * 52),
        (Plan("pull", 2, 1), 512 * 75 * 0.6 * (4 + 8 * 52)),
    ],
)
def test_bytes_are_those_of_the_formula(plan: Plan, nbytes: float) -> None:
    assert plan.nbytes(load(512, 75), 52, 4, 4) == pytest.approx(nbytes)


def test_a_grid_beats_rows_and_columns_on_many_servers() -> None:
    """16 servers, 75 nonzeros a row, 200 columns: rows 3.3, columns 1.4, a grid of 2 x 8 1.0."""
    found = {plan: plan.nbytes(load(2048, 75), 200, 4, 4) for plan in allowed_plans("ship", "auto", 16, 200)}
    best = min(found, key=lambda plan: found[plan])
    assert (best.row_blocks, best.column_blocks) == (2, 8)
    assert found[Plan("ship", 16, 1)] / found[best] == pytest.approx(3.3, abs=0.4)
    assert found[Plan("ship", 1, 16)] / found[best] == pytest.approx(1.4, abs=0.2)


@pytest.mark.parametrize("servers", [2, 4, 16])
@pytest.mark.parametrize("nonzeros", [1, 5, 75, 500])
def test_the_choice_is_the_least_of_what_is_allowed(servers: int, nonzeros: int) -> None:
    allowed, given = allowed_plans("auto", "auto", servers, 200), (load(512, nonzeros), 200, 4, 4)
    chosen = cheapest(allowed, *given)
    assert chosen.nbytes(*given) == min(plan.nbytes(*given) for plan in allowed)
    said = cost_table("wide", allowed, *given)
    assert said.count("\n") == len(allowed) and f"{chosen!s}" in next(x for x in said.split("\n") if "chosen" in x)
    if nonzeros == 1:
        assert chosen.protocol == "pull"  # one-hot rows


def test_what_a_split_allows() -> None:
    assert grid_shapes("row", 6, 8) == [(6, 1)] and grid_shapes("column", 6, 8) == [(1, 6)]
    assert grid_shapes("grid", 6, 8) == [(3, 2), (2, 3)]
    assert grid_shapes("auto", 4, 8) == [(4, 1), (2, 2), (1, 4)] and grid_shapes("auto", 4, 2) == [(4, 1), (2, 2)]
    for split, servers, width in (("column", 9, 8), ("grid", 5, 8)):
        with pytest.raises(ConfigError, match=f"strategy.split={split} was set with strategy.servers={servers}"):
            grid_shapes(split, servers, width)
