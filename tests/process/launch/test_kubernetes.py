"""examples/kubernetes: its manifests are valid, and the commands of its pods train here as they would in a cluster.

The tests play the cluster: they expand a JobSet into its pods, with the variables that Kubernetes sets, and start the
command of each pod as a process. Instead of the name of the first pod, pods have the loopback address.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked
import kubernetes_validate
import pytest
import yaml
from forked import Program
from helpers import REPO, ok, rest_exhaustive, run, summary

FOLDER = REPO / "examples" / "kubernetes"
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
"""The API's classes by kind; Kubeflow generates them from the schemas of the custom resources."""
SMALL = ("data.num_rows=600", "data.num_features=400", "data.batch_size=32", "trainer.max_epochs=5")
LOCAL = ("strategy=ps", "strategy.servers=2", "data=planted_sparse", "model=sparse", *SMALL)
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


def model(kind: str) -> Any:
    """The class of a kind; the package takes seconds to import, which collecting the tests need not wait for."""
    from kubeflow_trainer_api import models

    return getattr(models, MODELS[kind])


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


# ------------------------------------------------------------------------------------------------- schemas


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_manifests_are_valid(name: str) -> None:
    content = manifest(name)
    if content["kind"] not in MODELS:
        kubernetes_validate.validate(content, kubernetes_validate.latest_version(), strict=True)
        return
    read = model(content["kind"]).from_dict(content)
    assert read is not None and read.to_dict() == plain(content), "the class leaves out what the schema does not have"
    for job in jobs_of(content):
        version = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        kubernetes_validate.validate(
            version | {"spec": job["template"]["spec"]}, kubernetes_validate.latest_version(), strict=True
        )


def test_the_validators_find_mistakes() -> None:
    content = manifest("jobset")
    content["spec"]["failurePolicy"]["maxRestart"] = 3
    read = model("JobSet").from_dict(content)
    assert read is not None and read.to_dict() != plain(content)
    content["spec"]["failurePolicy"] = {"maxRestarts": "3"}
    with pytest.raises(ValueError, match="valid integer"):
        model("JobSet").from_dict(content)


def test_the_image_is_built_from_files_that_exist() -> None:
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    copied = [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]
    assert {"pyproject.toml", "gtrain", "conf", "plugins"} <= set(copied)
    assert [source for source in copied if not (REPO / source).exists()] == []
    assert json.loads(next(line for line in lines if line.startswith("ENTRYPOINT ")).split(" ", 1)[1]) == ["gtrain"]


def plain(node: Any) -> Any:
    """A copy without aliases."""
    return json.loads(json.dumps(node))


def jobs_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The replicated jobs of a JobSet or of a runtime."""
    spec = content["spec"]
    return spec.get("template", {}).get("spec", spec).get("replicatedJobs", [])


# ------------------------------------------------------------------------------------------------- pods


def jobset_of(runtime: dict[str, Any], train_job: dict[str, Any]) -> dict[str, Any]:
    """The JobSet that Kubeflow Trainer makes: the job's name; its number of nodes and its args for the trainer."""
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    jobset, trainer = plain(runtime["spec"]["template"]), train_job["spec"]["trainer"]
    jobset["metadata"] = {"name": train_job["metadata"]["name"]}
    for job in jobset["spec"]["replicatedJobs"]:
        if job["template"].get("metadata", {}).get("labels", {}).get(STEP) == "trainer":
            spec = job["template"]["spec"]
            spec["completions"] = spec["parallelism"] = trainer["numNodes"]
            (container,) = spec["template"]["spec"]["containers"]
            assert container["name"] == "node"
            container["args"] = trainer["args"]
    return jobset


@dataclass
class Pod:
    """A pod: its first container's command with all variables expanded."""

    name: str
    command: list[str]
    init: list[str]
    environment: dict[str, str] = field(repr=False)

    @property
    def trains(self) -> bool:
        return "serve" not in self.command


def pods(jobset: dict[str, Any], folder: Path, port: int, restart: int, uid: str) -> Iterator[Pod]:
    """The pods of a JobSet; the volumes are folders."""
    name = jobset["metadata"]["name"]
    labels = {"jobset-name": name, "jobset-uid": uid, "restart-attempt": str(restart)}
    labels = {f"jobset.sigs.k8s.io/{key}": value for key, value in labels.items()}
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
        (container,), (init,) = spec["template"]["spec"]["containers"], spec["template"]["spec"]["initContainers"]
        for index in range(spec["completions"]):
            environment = variables(container, labels)
            assert (
                environment["RENDEZVOUS"]
                == f"tcp://{name}-{jobset['spec']['replicatedJobs'][0]['name']}-0-0.{name}:29500"
            )
            environment |= {"JOB_COMPLETION_INDEX": str(index), "RENDEZVOUS": f"tcp://127.0.0.1:{port}"}
            pod = f"{name}-{job['name']}-0-{index}"
            mounts = {f"{mount['mountPath']}/": f"{folder}/{pod}/{mount['name']}/" for mount in init["volumeMounts"]}
            whole = [*container.get("command", ["gtrain"]), *container.get("args", [])]
            command = [replaced(expanded(word, environment), mounts) for word in whole]
            yield Pod(pod, command, [replaced(word, mounts) for word in init["command"]], environment)


def variables(container: dict[str, Any], labels: dict[str, str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            label = re.fullmatch(r"metadata\.labels\['(.+)'\]", source["fieldRef"]["fieldPath"])
            assert label is not None
            values[entry["name"]] = labels[label[1]]
        elif "resourceFieldRef" in source:
            assert source["resourceFieldRef"]["resource"] == "limits.cpu" and container["resources"]["limits"]["cpu"]
            values[entry["name"]] = "1"  # this machine has fewer cores
        else:
            values[entry["name"]] = expanded(entry["value"], values)
    return values


def expanded(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: values.get(match[1], match[0]), text)


def replaced(text: str, mounts: dict[str, str]) -> str:
    for path, folder in mounts.items():
        text = text.replace(path, folder)
    return text


def prepare(pod: Pod, folder: Path) -> None:
    """Mount the secret, whose files a group may read, and run the init container."""
    for volume in ("secret", "keys"):
        (folder / pod.name / volume).mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "job.key", folder / pod.name / "secret" / "job.key")
    (folder / pod.name / "secret" / "job.key").chmod(0o440)
    ok(run(pod.init, cwd=folder))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with the secret and the shared volume."""
    ok(forked.gtrain("key", "cluster.key_file=job.key", cwd=tmp_path))
    (tmp_path / "work").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    ok(forked.gtrain(*LOCAL, "trainer.num_nodes=2", "hydra.run.dir=run", cwd=folder))
    return summary(folder / "run")


def result(work: Path) -> dict[str, Any]:
    (path,) = (work / "runs").rglob("summary.json")
    return summary(path.parent)


@pytest.mark.slow
@pytest.mark.parametrize("source", rest_exhaustive(["jobset", "trainjob"], "trainjob"))
def test_the_commands_of_the_pods_train_as_one_machine_does(
    source: str, cluster: Path, undisturbed: dict[str, Any]
) -> None:
    jobset = manifest("jobset") if source == "jobset" else jobset_of(manifest("runtime"), manifest("trainjob"))
    jobs = []
    for pod in pods(jobset, cluster, free_port(), 0, str(uuid.uuid4())):
        prepare(pod, cluster)
        assert pod.command[0] == "gtrain"
        arguments = [*pod.command[1:], *SMALL * pod.trains]
        jobs.append(Program("-m", "gtrain", *arguments, cwd=cluster / "work", env=pod.environment))
    assert len([ok(program.end()) for program in jobs]) == 4
    assert result(cluster / "work")["history"] == undisturbed["history"]
    assert [rank["role"] for rank in result(cluster / "work")["ranks"]] == ["worker"] * 2 + ["parameter"] * 2


@pytest.mark.slow
def test_a_jobset_that_restarts_resumes_from_its_last_checkpoint(cluster: Path, undisturbed: dict[str, Any]) -> None:
    """A pod of the workers is killed; the JobSet's controller ends the others and starts all again."""
    work, uid = cluster / "work", str(uuid.uuid4())
    kill = f"_target_:gtrain.testing.faults.KillRank,rank:1,epoch:2,record:{cluster}/dead,once:true"
    more = [*SMALL, "strategy.max_restarts=0", f"+callbacks.kill={{{kill}}}"]
    for restart in range(2):
        jobs = []
        for pod in pods(manifest("jobset"), cluster, free_port(), restart, uid):
            prepare(pod, cluster)
            arguments = [*pod.command[1:], *(more if pod.trains else [])]
            jobs.append((pod, Program("-m", "gtrain", *arguments, cwd=work, env=pod.environment)))
        if restart == 0:
            failed = next(program.end() for pod, program in jobs if pod.name == "clicks-worker-0-1")
            assert failed.returncode == 1 and "rank 1 of 2 (machine 1) was killed by SIGKILL" in failed.stderr
            for _, program in jobs:
                program.kill()
        else:
            done = [ok(program.end()) for _, program in jobs]
            assert "gtrain: restarting the job from its last checkpoint in" in done[0].stderr
    assert result(work)["history"] == undisturbed["history"]
    assert result(work)["metrics"] == undisturbed["metrics"]


@pytest.mark.slow
def test_a_drained_pod_of_a_server_has_the_ranks_save(cluster: Path, undisturbed: dict[str, Any]) -> None:
    """The pod of one server gets SIGTERM in the middle of an epoch; the JobSet starts all again, at the next step."""
    work, uid = cluster / "work", str(uuid.uuid4())
    for restart in range(2):
        jobs: list[Program] = []
        drain: list[str] = []
        for pod in sorted(pods(manifest("jobset"), cluster, free_port(), restart, uid), key=lambda pod: pod.trains):
            prepare(pod, cluster)
            more = [*SMALL, *drain] if pod.trains else []
            environment = {**pod.environment, "PYTHONPATH": str(Path(forked.__file__).with_name("assets"))}
            jobs.append(Program("-m", "gtrain", *pod.command[1:], *more, cwd=work, env=environment))
            if restart == 0 and not drain:
                drain = [f"+callbacks.drain={{_target_:drain.DrainServer,process:{jobs[0].pid}}}"]
        done = [program.end() for program in jobs]
        if restart == 0:
            server, first = done[0], done[2]
            assert [program.returncode for program in done[1:]] == [0, 1, 1], first.stderr
            assert "the server waits for the end of the job" in server.stderr
            assert "received SIGTERM; the ranks save a checkpoint after their step and end" in first.stderr
            assert "to resume within epoch 2" in first.stderr
        else:
            assert "gtrain: restarting the job from its last checkpoint in" in ok(done[2]).stderr
    assert result(work)["history"] == undisturbed["history"]
    assert result(work)["metrics"] == undisturbed["metrics"]


def test_a_pod_without_an_index_is_refused(tmp_path: Path) -> None:
    done = forked.gtrain(*LOCAL, "cluster=kubernetes", cwd=tmp_path)
    assert done.returncode == 1 and "JOB_COMPLETION_INDEX is absent." in done.stderr
    more = ("cluster=kubernetes", "cluster.rank=0")
    done = forked.gtrain(*LOCAL, *more, cwd=tmp_path, env={"JOB_COMPLETION_INDEX": "1"})
    assert done.returncode == 1 and "cluster.rank=0 was set; this pod has the completion index 1." in done.stderr
