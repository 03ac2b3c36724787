"""PyTorch-BigGraph 1.0.0, for bench_pbg.py: run by the interpreter of an environment that has torchbiggraph.

    python tests/benchmarks/peers/pbg_torchbiggraph.py --data FOLDER --dimension 400 --batch 5000 --negatives 1000 1000

Its importers make its own files of the folder's train, valid and test triples; its trainer runs with one worker, its
filtered evaluator ranks the test triples among all entities. Prints edges, CPU seconds of all its processes and MRR as
JSON; the CPU seconds are those of the epochs after the first.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import torchbiggraph.schema
from torchbiggraph.config import ConfigSchema, EntitySchema, RelationSchema
from torchbiggraph.converters.import_from_tsv import convert_input_data
from torchbiggraph.eval import do_eval_and_report_stats
from torchbiggraph.filtered_eval import FilteredRankingEvaluator
from torchbiggraph.train import train

SPLITS = ("train", "valid", "test")
OPERATOR = "complex_diagonal"


def settings(folder: Path, options: argparse.Namespace, all_negs: bool = False, **others: Any) -> ConfigSchema:
    """Complex diagonal operators on dynamic relations, softmax over dot products, row-wise Adagrad."""
    near, far = options.negatives
    common = {
        "entities": {"all": EntitySchema(num_partitions=1)},
        "relations": [RelationSchema(name="all", lhs="all", rhs="all", operator=OPERATOR, all_negs=all_negs)],
        "dynamic_relations": True,
        "entity_path": str(folder / "entities"),
        "edge_paths": [str(folder / split) for split in SPLITS],
        "checkpoint_path": str(folder / "model"),
        "dimension": options.dimension,
        "comparator": "dot",
        "loss_fn": "softmax",
        "lr": 0.1,
        "global_emb": False,
        "batch_size": options.batch,
        "num_batch_negs": near,
        "num_uniform_negs": far,
        "eval_fraction": 0.0,
        "workers": 1,
        "verbose": 0,
    }
    return ConfigSchema(**{**common, **others})


def unpack_optional(type_: Any) -> Any:
    """``X`` of ``Optional[X]``, which torchbiggraph's own function does not find with Python 3.11."""
    inner = [argument for argument in get_args(type_) if argument is not type(None)]
    if get_origin(type_) is not Union or len(inner) != 1:
        raise TypeError
    return inner[0]


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def trained(folder: Path, options: argparse.Namespace, epochs: int) -> float:
    """CPU seconds of a training from its beginning."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    began = cpu_seconds()
    edges = [str(folder / "train")]
    train(settings(folder, options, edge_paths=edges, num_epochs=epochs))
    return cpu_seconds() - began


def mrr(folder: Path, options: argparse.Namespace) -> float:
    """Filtered, of the test triples."""
    # a batch's scores of all entities are in memory; negatives from the batch would be ranked twice
    others = {"edge_paths": [str(folder / "test")], "num_uniform_negs": 0, "num_batch_negs": 0, "batch_size": 500}
    config = settings(folder, options, all_negs=True, **others)
    evaluator = FilteredRankingEvaluator(config, [str(folder / split) for split in SPLITS])
    return float(list(do_eval_and_report_stats(config, evaluator=evaluator))[-1][2].metrics["mrr"])


def main() -> None:
    """Import, train twice, rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.txt, valid.txt and test.txt")
    parser.add_argument("--dimension", type=int, default=400)
    parser.add_argument("--batch", type=int, default=5000)
    parser.add_argument("--negatives", type=int, nargs=2, default=[1000, 1000], help="from the batch, uniform")
    parser.add_argument("--epochs", type=int, default=2, help="measured ones; one more goes before")
    options = parser.parse_args()
    torchbiggraph.schema.unpack_optional = unpack_optional
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = settings(folder, options)
        raw = [options.data / f"{split}.txt" for split in SPLITS]
        convert_input_data(
            config.entities, config.relations, config.entity_path, config.edge_paths, raw,
            lhs_col=0, rhs_col=2, rel_col=1, dynamic_relations=True,
        )  # fmt: skip
        with open(raw[0]) as lines:
            edges = sum(1 for _ in lines)
        first, all_of_them = (trained(folder, options, epochs) for epochs in (1, 1 + options.epochs))
        result = {"edges": edges * options.epochs, "cpu": all_of_them - first, "mrr": mrr(folder, options)}
    print(f"RESULT {json.dumps(result)}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
