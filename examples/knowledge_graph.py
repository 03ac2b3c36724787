"""Learn embeddings of a knowledge graph from a file of triples, with buckets as in PyTorch-BigGraph.

The file has one triple per line: head, relation and tail, separated by tabs. Only the partitions of one bucket are in
memory at a time, so the table may be larger than memory. The trained vectors are exported as text.

    python examples/knowledge_graph.py [FOLDER]

FOLDER has train.txt, valid.txt and test.txt; without it the script writes a small family tree.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

FAMILIES, CHILDREN = 60, 4


def write_family(folder: Path) -> None:
    """Write parents, their children and the children's siblings; a tenth of the sibling triples is held out."""
    folder.mkdir(exist_ok=True)
    triples, held_out = [], []
    for family in range(FAMILIES):
        children = [f"child_{family}_{number}" for number in range(CHILDREN)]
        for child in children:
            triples += [(f"mother_{family}", "parent_of", child), (f"father_{family}", "parent_of", child)]
        siblings = [(first, "sibling_of", second) for first, second in itertools.permutations(children, 2)]
        held_out.append(siblings.pop(family % len(siblings)))
        triples += siblings
    middle = len(held_out) // 2
    for name, rows in (("train", triples), ("valid", held_out[:middle]), ("test", held_out[middle:])):
        (folder / f"{name}.txt").write_text("".join("\t".join(row) + "\n" for row in rows))


def gtrain(*overrides: str) -> None:
    """Run the command, and stop where it fails."""
    subprocess.run([sys.executable, "-m", "gtrain", *overrides], check=True)


def main(folder: Path) -> None:
    """Train on four partitions, print the mean reciprocal rank of held-out tails, and export the vectors."""
    options = [
        "strategy=pbg",
        "strategy.num_partitions=4",
        "data=kg",
        f"data.path={folder.resolve()}",
        "data.batch_size=500",
        "model=kg",
        "model.dimension=32",
    ]
    gtrain(*options, "trainer.max_epochs=30", "hydra.run.dir=kg_run")
    metrics = json.loads(Path("kg_run/summary.json").read_text())["metrics"]
    print(f"test MRR: {metrics['test/mrr']:.3f}")
    gtrain("export", *options, "format=tsv", "ckpt_path=kg_run/checkpoints/last.ckpt", "output=vectors.tsv")
    with Path("vectors.tsv").open() as vectors:
        print("first vector:", vectors.readline()[:60], "...")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        write_family(Path("family"))
        main(Path("family"))
