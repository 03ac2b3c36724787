"""The settings of models, group ``model``: what a network gets, and what the module around it keeps. Light: no torch.

The group is open, for any network may be named: it gets the settings that it names. These are held to their types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gtrain.settings import Settings, setting


@dataclass
class NetworkConfig(Settings):
    """Settings that the built-in networks share; a network of another package gets those that it names."""

    group: ClassVar[str] = "model"
    hidden_channels: int = setting(64, "width of hidden layers", least=1)
    num_layers: int = setting(2, "layers", least=1)
    dropout: float = setting(0.5, "after each hidden layer", least=0, below=1, hint="0 switches it off.")
    norm: str | None = setting(None, "`batch`, `layer` or `none`")
    act: Any = setting("relu", "activation", type="str or null")
    heads: int = setting(1, "attention heads", least=1)
    aggr: Any = setting("mean", "`mean`, `max` or `sum`", type="str")
    input_dropout: Any = setting(0.0, "on the input features", type="float")


@dataclass
class ModuleConfig(Settings):
    """Settings of the modules around networks, which a network does not get."""

    group: ClassVar[str] = "model"
    optimizer: Any = setting(None, "any torch optimizer by its import path, with its settings", type="dict")
    scheduler: Any = setting(None, "any torch scheduler, stepped once an epoch", type="dict or null")
    monitor: Any = setting("val/loss", "what a plateau scheduler looks at", type="str")
    class_weights: Any = setting(
        None,
        "one weight for each class, or `balanced`: inverse class frequency in the training split",
        type="list or str or null",
    )
    test_metrics: Any = setting(None, "torchmetrics that the test computes as well", type="dict or null")
    sparse_optimizer: Any = setting(
        None,
        "an optimizer of `gtrain.nn` for learned features and for the layer that reads sparse ones; without a "
        "`_target_` `model.optimizer` has them too. `strategy=ps` needs it",
        type="dict or null",
    )
    loss: Any = setting("softmax", "`ranking` (with `model.margin`), `logistic` or `softmax`", type="str")
    task: Any = setting("node", "what is predicted, `node` labels or `link`s; `data.task` follows it", type="str")
    joint_types: Any = setting(False, "edges of all types are predicted at once", type="bool")
    score: Any = setting(
        None,
        "what the best checkpoint is best in; null: `val/acc`, or `val/auc` where of two classes the smaller has less "
        "than a third of the training labels",
        type="str or null",
    )
    learn_features: Any = setting(False, "nodes without features get a learned row each", type="bool")
    decoder: Any = setting("dot", "`dot`, `distmult` (a vector for each relation) or `mlp`", type="str")
    num_negatives: Any = setting(1, "false targets for each true edge", type="int")
    filtered: Any = setting(True, "leave known edges out of the ranking", type="bool")
