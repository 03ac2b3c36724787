"""Settings of group ``model``: those of networks, and those of the modules around them. Light: imports no torch.

The group is open: a network of another package has its own settings. The types of these are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gtrain.settings import Settings, setting


@dataclass
class NetworkConfig(Settings):
    """Settings that the built-in networks share; another network gets those that its constructor names."""

    group: ClassVar[str] = "model"
    hidden_channels: int = setting(64, "width of hidden layers", least=1)
    num_layers: int = setting(2, "layers", least=1)
    dropout: float = setting(0.5, "after each hidden layer", least=0, below=1, hint="0 switches it off.")
    norm: str | None = setting(None, "`batch`, `layer` or `none`")
    jk: Any = setting(
        None,
        "jumping knowledge: a linear layer computes the scores from the `last` layer's output, or from those of all "
        "layers: `cat` (concatenated), `max`, or `lstm` (summed with the weights of an LSTM)",
        type="str or null",
    )
    residual: Any = setting(False, "add a layer's input to the output of its convolution", type="bool")
    ego: Any = setting(
        False, "a node's own representation has weights of its own, apart from its neighbours'", type="bool"
    )
    act: Any = setting("relu", "activation", type="str or null")
    heads: int = setting(1, "attention heads", least=1)
    aggr: Any = setting("mean", "`mean`, `max` or `sum`", type="str")
    input_dropout: Any = setting(0.0, "on the input features", type="float")


@dataclass
class ModuleConfig(Settings):
    """Settings of the modules around networks, not passed to the network."""

    group: ClassVar[str] = "model"
    optimizer: Any = setting(None, "any torch optimizer by its import path, with its settings", type="dict")
    scheduler: Any = setting(None, "any torch scheduler, stepped once per epoch", type="dict or null")
    monitor: Any = setting("val/loss", "value that a plateau scheduler monitors", type="str")
    class_weights: Any = setting(
        None,
        "one weight per class, or `balanced`: inverse class frequency in the training split",
        type="list or str or null",
    )
    label_smoothing: float = setting(
        0.0, "share of the training target spread evenly over the classes", least=0, below=1
    )
    test_metrics: Any = setting(
        None, "metrics of the test, a list of `acc`, `f1` and `auc`; null: all of them", type="list or null"
    )
    sparse_optimizer: Any = setting(
        None,
        "an optimizer of `gtrain.nn` for learned features and for the layer that reads sparse ones; null: "
        "`model.optimizer`. `strategy=ps` needs it",
        type="dict or null",
    )
    loss: Any = setting("softmax", "`ranking` (with `model.margin`), `logistic` or `softmax`", type="str")
    regression_loss: str | None = setting(
        "l1",
        "loss of standardised labels that are numbers to predict",
        words={
            "l1": "absolute error",
            "l2": "squared error",
            "huber": "squared up to a standard deviation, then absolute",
        },
    )
    task: Any = setting("node", "predict `node` labels or `link`s; the default of `data.task`", type="str")
    joint_types: Any = setting(False, "predict edges of all types together", type="bool")
    score: Any = setting(
        None,
        "metric that selects the best checkpoint; null: `val/acc`, `val/auc` of several labels per row or if the "
        "smaller of two classes has less than a third of the training labels, or `val/mae` if labels are numbers to "
        "predict",
        type="str or null",
    )
    learn_features: Any = setting(False, "learn a feature row for each node without features", type="bool")
    decoder: Any = setting("dot", "`dot`, `distmult` (a vector per relation) or `mlp`", type="str")
    num_negatives: Any = setting(1, "negatives per true edge", type="int")
    filtered: Any = setting(True, "leave known edges out of the ranking", type="bool")
    eval_k: Any = setting(10, "length of the lists of recommendations that `map@k` scores", type="int")
