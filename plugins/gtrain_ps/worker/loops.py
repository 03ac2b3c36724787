"""Lightning's counters of a run, as it writes them into checkpoints."""

from __future__ import annotations

import copy
from typing import Any

State = dict[str, Any]


def moved(loops: State, steps: int) -> State:
    """The counters of a training loop that is to begin with a step some steps later in the same epoch.

    Lightning counts a step when it begins and when it has ended, and takes what it finds for a run that was cut off in
    the middle of a step only if the totals say so: a run between two steps would take itself for one that had just
    validated.

    Args:
        loops: what ``fit_loop.state_dict()`` said in the middle of a step.
        steps: later, 0 for that step itself.
    """
    state = copy.deepcopy(loops)
    batches = state["epoch_loop.batch_progress"]
    total, current = batches["total"]["ready"] - 1 + steps, batches["current"]["ready"] - 1 + steps
    batches["total"] |= {"ready": total, "started": total, "processed": total - 1, "completed": total - 1}
    batches["current"] |= {"ready": current, "started": current, "processed": current, "completed": current}
    batches["is_last_batch"] = False
    state["epoch_loop.state_dict"]["_batches_that_stepped"] += steps - 1  # Lightning adds one when it goes on
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for counts in (optimizer["step"], optimizer["zero_grad"]):
        for kind in ("total", "current"):
            done = counts[kind]["completed"] + steps
            counts[kind] |= {name: done for name in counts[kind]}
    for loader in state["state_dict"].get("combined_loader", ()):
        if "done" in loader:
            loader["done"] = current
    return state
