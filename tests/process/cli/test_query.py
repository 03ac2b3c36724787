"""``gtrain score`` and ``gtrain neighbors``: of a run of any strategy, when the data are gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from forked import gtrain
from helpers import ok

STRATEGIES = {
    "single": [],
    "pbg": ["strategy.num_partitions=2", "model.operator=translation", "model.comparator=l2", "data.batch_size=50"],
    "ps": ["trainer.num_nodes=2", "model.reciprocal=false"],
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_questions_to_a_run_without_its_data(strategy: str, tmp_path: Path) -> None:
    rng, kg = np.random.default_rng(0), tmp_path / "kg"
    kg.mkdir()
    triples = {(f"e{h}", f"r{r}", f"e{(h * (r + 2) + 1) % 40}") for h in range(40) for r in range(3)}
    order = [sorted(triples)[place] for place in rng.permutation(len(triples))]
    known = {f"e{number}" for number in range(40)}
    splits = {"train": order[20:], "valid": order[:10], "test": order[10:20]}
    for split, edges in splits.items():
        (kg / f"{split}.txt").write_text("".join("\t".join(edge) + "\n" for edge in edges))
    common = ["data=kg", f"data.path={kg}", "model=kg", "model.dimension=8", "model.init_scale=0.3", "logger=none",
              "trainer.max_epochs=2", "trainer.enable_progress_bar=false", "hydra.run.dir=run"]  # fmt: skip
    ok(gtrain(f"strategy={strategy}", *common, *STRATEGIES[strategy], cwd=tmp_path))
    ok(gtrain("export", "run=run", "format=tsv", "output=x.tsv", cwd=tmp_path))
    shutil.rmtree(kg)
    lines = [line.split("\t") for line in (tmp_path / "x.tsv").read_text().splitlines()]
    rows = {name: np.array(numbers, float) for name, *numbers in lines}
    assert set(rows) == known
    lines = [line.split("\t") for line in (tmp_path / "x.tsv.relations.tsv").read_text().splitlines()]
    parameters = {tuple(line[i] for i in (0, 1, 3)): np.array(line[5:], float) for line in lines}

    def score(head: str, tail: str) -> float:
        """Of relation r1, to find the tail."""
        if strategy == "pbg":
            return -float(np.linalg.norm(rows[head] + parameters["r1", "forwards", "vector"] - rows[tail]))
        real, imaginary = (parameters["r1", "forwards", part] for part in ("real", "imaginary"))
        (x, other) = (rows[tail], rows[head]) if strategy == "ps" else (rows[head], rows[tail])
        z = (x[:4] + 1j * x[4:]) * (real + 1j * imaginary)
        return float(np.concatenate([z.real, z.imag]) @ other)

    printed = ok(gtrain("score", "run=run", "e3,r1,?", "e3,r1,e5", "k=5", cwd=tmp_path)).stdout.splitlines()
    best = sorted(known, key=lambda tail: -score("e3", tail))[:5]
    answers = [line.split("\t") for line in printed]
    assert [answer[:3] for answer in answers] == [*(["e3", "r1", tail] for tail in best), ["e3", "r1", "e5"]]
    got = [float(answer[3]) for answer in answers]
    np.testing.assert_allclose(got, [score("e3", tail) for tail in (*best, "e5")], rtol=1e-4, atol=1e-6)
    text = ok(gtrain("score", "run=run", "e3,r1,?", "k=40", "filtered=true", "format=json", cwd=tmp_path)).stdout
    assert {answer["name"] for answer in json.loads(text)["answers"]} == known - {"e10"}  # 3 * 3 + 1
    near = ok(gtrain("neighbors", "run=run", "e3", "e4", "k=2", cwd=tmp_path)).stdout.splitlines()
    assert [line.split("\t")[0] for line in near] == ["e3", "e3", "e4", "e4"]
    store = next((tmp_path / "data" / "stores").glob("kg-*"))
    store.rename(tmp_path / "elsewhere")
    gone = gtrain("score", "run=run", "e3,r1,?", cwd=tmp_path)
    assert gone.returncode == 1 and "is not on this machine" in gone.stderr and "HINT: it has the names" in gone.stderr
    if strategy != "pbg":  # whose rows are found by the store at its place
        again = ok(gtrain("score", "run=run", "store=elsewhere", "e3,r1,e5", cwd=tmp_path)).stdout
        assert again.splitlines() == printed[-1:]


@pytest.mark.slow
def test_a_run_without_embeddings_is_refused(tmp_path: Path) -> None:
    ok(
        gtrain(
            "strategy=single",
            "data.num_nodes=300",
            "data.num_edges=2400",
            "trainer.max_epochs=1",
            "hydra.run.dir=run",
            cwd=tmp_path,
        )
    )
    refused = gtrain("score", "run=run", "0,1", cwd=tmp_path)
    assert refused.returncode == 1
    assert (
        "which has no embeddings of entities and relations" in refused.stderr and "HINT: name a run" in refused.stderr
    )
