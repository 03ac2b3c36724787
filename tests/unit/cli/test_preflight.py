"""What is refused before the data are read: the model, the strategy and the settings, on an outline of the graph."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from forked import gtrain
from helpers import REPO, ok, rest_exhaustive, summary
from hydra import compose
from omegaconf import open_dict

from gtrain import backends, config, targets
from gtrain.errors import DataError, GtrainError
from gtrain.model.inputs import zero_demand
from gtrain.run import preflight, task

STRATEGIES = ("pbg", "ps", "pyg", "sar", "single")
ROWS = "model.sparse_optimizer={_target_:gtrain.nn.RowwiseAdagrad,lr:0.1}"  # which strategy=ps wants of a table
DATA = {  # a generated graph that each model trains on
    "hetero_sage": ["data=planted_hetero"],
    "hgt": ["data=planted_hetero"],
    "kg": ["data=planted_kg"],
    "link_gcn": ["data=planted_temporal"],
    "link_sage": ["data=planted_temporal", ROWS],
    "dgl_rgcn": ["data=planted_kg", "model.task=link", "+model.learn_features=true", "model.score=val/mrr"],
    "rgcn": ["data=planted_kg", "model.task=link", "+model.learn_features=true", "model.score=val/mrr"],
    "sparse": ["data=planted_sparse"],
}
SMALL = {
    "planted": ["data.num_nodes=60", "data.num_edges=400", "data.num_classes=3"],
    "planted_hetero": [
        "data.num_papers=80",
        "data.num_authors=40",
        "data.num_terms=20",
        *(f"data.num_{kind}=300" for kind in ("writes", "cites", "mentions")),
    ],
    "planted_temporal": ["data.num_nodes=40", "data.num_events=300", "data.num_communities=4"],
    "planted_kg": ["data.num_entities=60", "data.num_positions=10", "data.num_triples=500"],
    "planted_sparse": ["data.num_rows=300", "data.num_features=50", "data.features_per_row=5"],
}
MODELS = sorted(path.stem for path in (REPO / "conf" / "model").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (REPO / "conf" / "experiment").glob("*.yaml"))
REAL = {  # where the data of an experiment are
    "a9a": {"data.path": "sparse/a9a", "data.test_path": "sparse/a9a.t"},
    "aifb": {"data.root": "rdf"},
    "codex_s": {"data.path": "kg/codex-s"},
    "codex_s_best": {"data.path": "kg/codex-s"},
    "collegemsg": {"data.path": "temporal/CollegeMsg.txt"},
    "cora": {"data.root": "planetoid"},
    "fb15k237": {"data.path": "kg/FB15k-237.tar.gz"},
    "fb15k237_best": {"data.path": "kg/FB15k-237.tar.gz"},
    "minesweeper": {"data.root": "heterophilous"},
    "photo": {"data.root": "amazon"},
    "umls": {"data.path": "kg/umls"},
    "wn18rr": {"data.path": "kg/wn18rr"},
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, composed_by_hydra: None) -> None:
    monkeypatch.chdir(tmp_path)


class Job:
    """A job as the command composes it: its configuration, and what the experiment sets that its strategy lacks."""

    def __init__(self, *overrides: str, verb: str = "train") -> None:
        cfg = compose("config", overrides=["paths.run=here", f"verb={verb}", *overrides], return_hydra_config=True)
        chosen = cfg.hydra.runtime.choices
        self.choices = {group: str(chosen[group]) for group in ("strategy", "data", "model")}
        with open_dict(cfg):
            del cfg["hydra"]
        self.typed = [override.lstrip("+").partition("=")[0] for override in overrides]
        self.left_out = config.fit_strategy(cfg, self.typed, experiment=chosen.get("experiment"))
        targets.settle(cfg, overrides)
        config.validate(cfg)
        self.settings = config.plain(cfg)

    def refusal(self) -> GtrainError | None:
        """What it is refused for before its data are read; None: it is not."""
        try:
            preflight.check(self.settings, self.choices, self.typed)
        except GtrainError as error:
            return error
        finally:
            assert not Path("data").exists(), "a store was made"
        return None


def refusal(*overrides: str, verb: str = "train") -> GtrainError | None:
    """What a job of these settings is refused for before its data are read; None: it is not."""
    return Job(*overrides, verb=verb).refusal()


def refused_when_typed(*overrides: str) -> str:
    """What a command with these settings is refused for, composed or before its data are read."""
    try:
        return str(refusal(*overrides))
    except GtrainError as error:
        return str(error)


def generated(experiment: str) -> list[str]:
    """Settings that name a small file in the format of an experiment's data; none where its source has no files."""
    source = (
        (REPO / "conf" / "experiment" / f"{experiment}.yaml").read_text().partition("override /data: ")[2].split()[0]
    )
    rng = random.Random(0)
    if source == "kg":
        triples = [f"e{rng.randrange(30)}\tr{rng.randrange(3)}\te{rng.randrange(30)}\n" for _ in range(400)]
        Path("kg").mkdir(exist_ok=True)
        for split, rows in (("train", triples), ("valid", triples[:40]), ("test", triples[40:80])):
            Path("kg", f"{split}.txt").write_text("".join(rows))
        return ["data.path=kg"]
    if source == "libsvm":
        rows = [f"{rng.choice('+-')}1 {rng.randrange(1, 20)}:1 {rng.randrange(20, 40)}:1\n" for _ in range(300)]
        Path("rows.svm").write_text("".join(rows))
        return ["data.path=rows.svm", "data.test_path=rows.svm"]
    if source == "temporal":
        events = [f"{rng.randrange(30)} {rng.randrange(30)} {time}\n" for time in range(400)]
        Path("events.txt").write_text("".join(events))
        return ["data.path=events.txt"]
    return []


@pytest.mark.parametrize(("model", "refused"), [("gcn", True), ("sage", False), ("link_sage", True)])
def test_negative_weights_are_refused_as_they_are_read(
    model: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise RuntimeError("the graph was read")

    monkeypatch.setattr("gtrain.data.module.prepare_graph", stop)
    Path("edges.txt").write_text("0 1 1\n1 2 -2\n")
    Path("labels.txt").write_text("0\n1\n0\n")
    overrides = ["paths.run=here", "verb=train", "data=edges", "data.path=edges.txt", "data.features=degree"]
    cfg = compose("config", overrides=[*overrides, "data.labels=labels.txt", f"model={model}"])
    settings = config.plain(cfg)
    data = task.data_module(settings, 1)
    data.weight_demand = partial(task._weight_demand, settings, f"model={model}")
    weight = rf"edges\.txt, line 2: the weight is -2, and model={model} takes weights of 0 or more"
    error = (DataError, weight) if refused else (RuntimeError, "the graph was read")
    with pytest.raises(error[0], match=error[1]):
        data.prepare_data()


@pytest.mark.parametrize(("model", "refused"), [("gcn", False), ("kg", True), ("link_sage", True)])
def test_weights_that_are_all_zero_are_refused_before_the_graph_is_cut(
    model: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise RuntimeError("the graph was cut")

    monkeypatch.setattr("gtrain.data.module.cut", stop)
    Path("edges.txt").write_text("".join(f"{node} {(node + 1) % 20} 0\n" for node in range(20)))
    Path("labels.txt").write_text("".join(f"{node % 2}\n" for node in range(20)))
    overrides = ["paths.run=here", "verb=train", "data=edges", "data.path=edges.txt", "data.labels=labels.txt"]
    settings = config.plain(compose("config", overrides=[*overrides, "data.features=degree", f"model={model}"]))
    data = task.data_module(settings, 1)
    data.zero_demand = partial(task._weight_demand, settings, f"model={model}", demand=zero_demand)
    sentence = rf"data.path=edges\.txt.*: all edge weights are 0, and with model={model} an edge's weight is the factor"
    error, message = (DataError, sentence) if refused else (RuntimeError, "the graph was cut")
    with pytest.raises(error, match=message):
        data.prepare_data()


def named(error: GtrainError) -> list[str]:
    """The strategies that a refusal names."""
    text = error.message.partition("Strategies that do: ")[2].rstrip(".") or str(error.hint).partition("strategy=")[2]
    words = text.replace(",", " ").replace(".", " ").split()
    return [word for word in words if word in STRATEGIES]


T = TypeVar("T")


def in_turn(items: Sequence[T], number: int, count: int) -> list[T]:
    """``count`` of the items, which differ from number to number."""
    first = number % len(items)
    return [*items, *items][first : first + min(count, len(items))]


def settings_for(model: str) -> list[str]:
    own = DATA.get(model, ["data=planted"])
    return [f"model={model}", *own, *SMALL[own[0].partition("=")[2]]]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["strategy=sar", "model=mlp"], "nothing to aggregate. Strategies that do: single."),
        (["strategy=ps"], "this model has none on this data. Strategies that do: pyg, sar, single."),
        (["strategy=pbg"], "no layers that pass messages. Strategies that do: pyg, sar, single."),
        (["strategy=sar", "data=planted_kg", "model=kg"], "Strategies that do: pbg, ps, single."),
        (["strategy=pyg", "data=planted_kg", "model=kg"], "Strategies that do: pbg, ps, single."),
        (["strategy=ps", "data=planted_hetero", "model=hgt"], "its optimizer is not one of gtrain.nn"),
        (["strategy=single", "+model.bogus=1"], "unexpected keyword argument 'bogus'"),
        (["strategy=single", "model.optimizer._target_=torch.optim.Adm"], "model.optimizer._target_=torch.optim.Adm"),
        (["strategy=single", "model.scheduler={_target_:torch.optim.Nope}"], "model.scheduler._target_="),
        (["strategy=single", "+model.optimizer.bogus=1"], "model.optimizer.bogus=1 was set; torch.optim.Adam has no"),
        (["strategy=single", "callbacks.checkpoint._target_=a.B"], "callbacks.checkpoint._target_=a.B was set"),
        (["strategy=single", "callbacks.checkpoint.mode=up"], "`mode` can be min, max but got up"),
        (["strategy=single", "ckpt_path=nowhere.ckpt"], "no such checkpoint exists"),
        (["strategy=sar", "data.num_parts=3"], "the store has 3 parts and the job 2 ranks"),
        (["strategy=sar", "data.batch_size=16"], "choose strategy=pyg or single"),
        (["strategy=single", "data.num_neighbors=[10,10]"], "data.num_neighbors=[10,10] was set; strategy=single"),
        (["strategy=sar", "data=edges", "data.path=no.txt"], "data.path=no.txt: no such file"),
        (["strategy=sar", "data.partitioner=file", "data.partition_path=no"], "data.partition_path=no was set"),
        (["strategy=single", "data=planted_kg", "model=kg", "model.operator=no"], "model.operator=no was set"),
        (["strategy=single", "trainer.precision=17"], "precision"),
        (["strategy=single", "data=planted_hetero", "model=sage"], "GraphSAGE is a network for graphs with one type"),
        (["strategy=single", "model=hetero_sage"], "HeteroSAGE is a network for graphs with several types"),
        (
            ["strategy=single", "data=planted_kg", "model=kg", "trainer.gradient_clip_val=1.0"],
            "trainer.gradient_clip_val=1.0 with model.sparse_optimizer: sparse gradients cannot be clipped",
        ),
    ],
)
def test_a_mistake_is_refused_before_the_data_are_read(overrides: list[str], said: str) -> None:
    error = refusal(*overrides)
    assert error is not None and said in str(error)
    for strategy in named(error) if "Strategies that do" in str(error) else ():
        others = [override for override in overrides if not override.startswith("strategy=")]
        assert refusal(f"strategy={strategy}", *others) is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.optimizer.lr=inf"], "model.optimizer.lr=inf was set; it must be a finite number"),
        (["model.optimizer.lr=nan"], "model.optimizer.lr=nan was set"),
        (["model.optimizer.lr=-0.1"], "model.optimizer.lr=-0.1 was set; it must be 0 or more"),
        (
            ["strategy.timeout_seconds=nan"],
            "strategy.timeout_seconds=nan was set; it must be a number above 0, and finite",
        ),
        (
            ["cluster.timeout_seconds=inf"],
            "cluster.timeout_seconds=inf was set; it must be a number above 0, and finite",
        ),
        (
            ["+cluster.bogus=1"],
            "cluster.bogus=1 was set; cluster has no key bogus; its keys are grace_seconds, isolated, key_file, kind",
        ),
        (["+paths.bogus=1"], "paths.bogus=1 was set; paths has no key bogus; its keys are data, run, runs, stores"),
        (["+data.bogus=1"], "data.bogus=1 was set; data has no key bogus; its keys are"),
        (["+trainer.bogus=1"], "trainer.bogus=1 was set; trainer has no key bogus; its keys are accelerator"),
        (["trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val=-1.0 was set; it must be at least 0"),
        (["trainer.gradient_clip_val=nan"], "trainer.gradient_clip_val=nan was set; it must be a finite number"),
        (["trainer.gradient_clip_algorithm=sum"], "trainer.gradient_clip_algorithm=sum was set"),
        (
            ["trainer.accelerator=tpu"],
            "trainer.accelerator=tpu was set.\nHINT: gtrain trains on cpu, gpu, cuda and auto",
        ),
        (["+bogus=1"], "bogus=1 was set; the configuration has no key bogus"),
        (["+verbs=test"], "did you mean verb?"),
        (["data.num_parts=0"], "data.num_parts=0 was set; it must be at least 1"),
        (["callbacks.checkpoint.monitor=nosuch"], "callbacks.checkpoint.monitor=nosuch was set"),
        (
            ["model.score=val/mrr"],
            "model.score=val/mrr was set; the model does not log val/mrr. It logs train/loss, val/acc",
        ),
        (
            [
                "model=sage",
                "model.task=link",
                "data=planted_temporal",
                "model.score=val/mrr",
                "model.label_smoothing=0.1",
            ],
            "model.label_smoothing=0.1 was set, and model.task=link predicts edges, which have no classes",
        ),
        (["correct_and_smooth=true"], "correct_and_smooth=true was set, and train writes no predictions"),
        (
            ["verb=predict", "correct_and_smooth=true", "trainer.limit_predict_batches=1"],
            "correct_and_smooth=true was set, and trainer.limit_predict_batches=1 leaves nodes without scores",
        ),
        (
            ["verb=predict", "correct_and_smooth=true", "trainer.fast_dev_run=true"],
            "correct_and_smooth=true was set, and trainer.fast_dev_run leaves nodes without scores",
        ),
        (
            ["model=kg", "data=planted_kg", "+model.label_smoothing=0.1"],
            "model.label_smoothing=0.1 was set, and KGEmbedding does not take it.\nHINT: set model.label_smoothing=0.",
        ),
        (["callbacks=early_stopping", "callbacks.early_stopping.monitor=val/los"], "monitor=val/los was set"),
        (["callbacks=early_stopping", "data.val_fraction=0"], "nothing is validated: data.val_fraction=0"),
        (["callbacks=early_stopping", "trainer.limit_val_batches=0"], "validated: trainer.limit_val_batches=0"),
        (["data=edges", "data.path=/dev/null"], "/dev/null is a device, a pipe or a socket"),
        (["ckpt_path=/dev/null"], "ckpt_path=/dev/null was set, which is neither a checkpoint folder nor a file"),
    ],
)
def test_a_value_without_a_meaning_is_refused(overrides: list[str], said: str) -> None:
    assert said in refused_when_typed("strategy=single", *overrides)


def test_keys_of_the_users_own_that_others_refer_to() -> None:
    assert refusal("strategy=single", "+rate=0.1", "model.optimizer.lr=${rate}") is None
    assert refusal("strategy=single", "+paths.mine=elsewhere", "paths.stores=${paths.mine}/stores") is None
    assert refusal("strategy=single", "callbacks.checkpoint.monitor=val/f1") is None
    unvalidated = ("strategy=single", "callbacks=early_stopping", "trainer.limit_val_batches=0")
    assert refusal(*unvalidated, "callbacks.early_stopping.monitor=train/loss") is None
    assert refusal(*unvalidated, "+callbacks.early_stopping.strict=false") is None


@pytest.mark.slow
def test_text_in_utf_16_and_other_files_are_named_before_they_are_read() -> None:
    lines = "".join(f"{node} {node + 1}\n" for node in range(200))
    for encoding, name in (
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32", "UTF-32"),
    ):
        Path("edges.txt").write_bytes(lines.encode(encoding))
        said = refused_when_typed("strategy=single", "data=edges", "data.path=edges.txt")
        assert f"edges.txt is text in {name}; gtrain reads UTF-8" in said
    Path("metrics.csv").write_text("epoch,loss\n0,1.0\n")
    assert "metrics.csv was set, which is neither" in refused_when_typed("strategy=single", "ckpt_path=metrics.csv")


def test_a_gpu_that_is_absent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    error = refusal("strategy=single", "trainer.accelerator=gpu")
    assert error is not None and "trainer.accelerator=gpu was set; torch finds no GPU" in str(error)


def test_more_devices_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    error = refusal("strategy=sar", "trainer.accelerator=gpu", "trainer.num_nodes=1", "trainer.devices=2")
    assert error is not None
    assert "trainer.devices=2 was set with trainer.accelerator=gpu; torch finds 1 GPU(s)" in error.message
    assert error.hint is not None and "trainer.num_nodes=2 trainer.devices=1 simulates machines" in error.hint


@pytest.mark.parametrize("key", ["features", "labels"])
def test_a_missing_file_of_nodes_is_refused_before_the_edges_are_read(key: str, tmp_path: Path) -> None:
    (tmp_path / "edges.tsv").write_text("this is no edge\n")  # reading it would fail in another way
    files = {"features": "degree", "labels": "y.txt"} | {key: "nowhere.txt"}
    (tmp_path / "y.txt").write_text("0\n")
    error = refusal("data=edges", "data.path=edges.tsv", *(f"data.{name}={file}" for name, file in files.items()))
    assert error is not None and f"data.{key}=nowhere.txt" in str(error)


def test_an_output_whose_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = refusal("strategy=single", "output=file/scores.npy", verb="predict")
    assert error is not None and "output=file/scores.npy was set" in str(error) and "is a file" in str(error)


@pytest.mark.parametrize("key", ["output", "data.store"])
def test_an_address_where_a_path_is_needed(key: str) -> None:
    error = refusal("strategy=single", f"{key}=s3://bucket/name", verb="predict")
    assert error is not None and f"{key}=s3://bucket/name was set; this setting takes a local path" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("command", [("hydra.run.dir=s3://bucket/run",), ("-m", "hydra.sweep.dir=s3://bucket/run")])
def test_an_address_as_the_folder_of_runs(command: tuple[str, ...], tmp_path: Path) -> None:
    result = gtrain(*command, "strategy=single", cwd=tmp_path)
    assert result.returncode == 1 and f"{command[-1]} was set; this setting takes a local path" in result.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", rest_exhaustive(MODELS, "gat", "hetero_sage", "kg", "link_sage", "mlp", "rgcn", "sparse")
)
def test_each_strategy_serves_a_model_or_names_those_that_do(model: str, tmp_path: Path) -> None:
    """Two of those that serve it train it; which ones differs from model to model."""
    if model.startswith("dgl_"):
        pytest.importorskip("dgl", reason="DGL is not installed: pip install 'gtrain[dgl]'", exc_type=Exception)
    settings = settings_for(model)
    errors = {strategy: refusal(f"strategy={strategy}", *settings) for strategy in STRATEGIES}
    served = [strategy for strategy, error in errors.items() if error is None]
    for error in filter(None, errors.values()):
        assert named(error) and {*named(error)} <= {*served}, error
    for strategy in in_turn(served, MODELS.index(model), 2):
        run = f"hydra.run.dir={strategy}"
        ok(gtrain(f"strategy={strategy}", *settings, "trainer.max_epochs=1", run, cwd=tmp_path))


@pytest.mark.parametrize(
    "experiment", [*EXPERIMENTS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERIMENTS[2:])]
)
def test_an_experiment_composes_with_each_strategy_or_is_refused_with_those_that_serve_it(experiment: str) -> None:
    data = generated(experiment)
    served, suggested = set(), set()
    for strategy in STRATEGIES:
        job = Job(f"experiment={experiment}", f"strategy={strategy}", *data)
        assert not backends.get(strategy).serves.violated(job.settings) and "\n" not in job.left_out
        error = job.refusal()
        if error is None:
            served.add(strategy)
            for setting in job.left_out.partition(": ")[2].split(", ") if job.left_out else ():
                key_value, _, source = setting.partition(" ")
                assert source == f"(experiment={experiment})"
                typed = refused_when_typed(f"experiment={experiment}", f"strategy={strategy}", *data, key_value)
                assert f"{key_value} was set" in typed
            continue
        unserved = f"strategy={strategy} does not serve model={job.choices['model']}"
        assert (unserved in str(error) or "its optimizer is not one of gtrain.nn" in str(error)) and named(error), error
        suggested |= {*named(error)}
    assert "single" in served and len(served) > 1 and suggested <= served


@pytest.mark.slow
@pytest.mark.parametrize("experiment", rest_exhaustive(EXPERIMENTS, "a9a", "codex_s", "collegemsg", "wn18rr"))
def test_each_experiment_trains_a_step_with_strategies_that_serve_it(
    experiment: str, real_data: Callable[[str], Path], tmp_path: Path
) -> None:
    """With one of them; which one differs from experiment to experiment."""
    files = generated(experiment)
    try:
        data = [f"{key}={real_data(name)}" for key, name in REAL[experiment].items()]
    except (KeyError, pytest.skip.Exception):
        if not files:
            pytest.skip(f"experiment={experiment} downloads its data, and they are not here")
        data = files
    short = ["trainer.max_epochs=1", "trainer.limit_train_batches=1", "trainer.limit_val_batches=0"]
    short += ["trainer.limit_test_batches=1"]
    served = []
    for strategy in STRATEGIES:
        given = [f"experiment={experiment}", f"strategy={strategy}", *data]
        if "model.sparse_optimizer" in str(refusal(*given)):
            given += [ROWS]
        if (error := refusal(*given)) is not None:
            assert "Strategies that do: " in str(error) and named(error)
            continue
        small = ["model.dimension=8"] if Job(*given).choices["model"] == "kg" else []
        served.append([*given, *small])
    for given in in_turn(served, EXPERIMENTS.index(experiment), 1):
        ok(gtrain(*given, *short, "hydra.run.dir=run", cwd=tmp_path))
        (epoch,) = summary(tmp_path / "run")["history"]
        assert math.isfinite(epoch["train/loss"])
