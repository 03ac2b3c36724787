"""Predict clicks from a log with millions of possible features, on a sparse parameter server.

Every line of the log is a click (1) or not (0) followed by the features that are present, in libsvm's format
``label id:value id:value ...``. The wide first layer lives in blocks on two servers; two workers send them the ids of
their batch and get back a few activations per row.

    python examples/click_log.py [FILE]

Without FILE the script writes a log of 20,000 impressions in which some advertisers are clicked more often.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

IMPRESSIONS, ADVERTISERS, SITES = 20_000, 300, 1_000


def write_log(path: Path) -> None:
    """Write impressions of an advertiser (ids from 0) on a site (ids from 1,000,000)."""
    generator = random.Random(0)
    click_rate = [generator.betavariate(0.5, 1.5) for _ in range(ADVERTISERS)]
    with path.open("w") as log:
        for _ in range(IMPRESSIONS):
            advertiser, site = generator.randrange(ADVERTISERS), generator.randrange(SITES)
            clicked = generator.random() < click_rate[advertiser]
            log.write(f"{int(clicked)} {advertiser}:1 {1_000_000 + site}:1\n")


def main(path: Path) -> None:
    """Train for three epochs and print the area under the ROC curve of the test rows."""
    command = [
        *(sys.executable, "-m", "gtrain"),
        "strategy=ps",
        "strategy.servers=2",
        "trainer.num_nodes=1",
        "trainer.devices=2",
        "data=libsvm",
        f"data.path={path.resolve()}",
        "data.split=random",
        "data.batch_size=500",
        "model=sparse",
        "trainer.max_epochs=3",
        "hydra.run.dir=click_run",
    ]
    subprocess.run(command, check=True)
    summary = json.loads(Path("click_run/summary.json").read_text())
    print(f"test AUC: {summary['metrics']['test/auc']:.3f}")
    for process in summary["ranks"]:
        print(f"{process['role']} {process['rank']}: {process['bytes_sent'] / 2**20:.1f} MiB sent")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        write_log(Path("clicks.txt"))
        main(Path("clicks.txt"))
