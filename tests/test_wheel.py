"""The wheel: built, installed into an environment of its own, and run from an empty folder."""

from __future__ import annotations

import json
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import jsonschema
import pytest
from helpers import REPO, ok, only_run, run, show, summary

EPOCHS = 2


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy of the files that it takes: a build leaves files beside them."""
    scratch = tmp_path_factory.mktemp("wheel")
    source = scratch / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((REPO / name).read_bytes())
    for folder in ("gtrain", "conf", "plugins"):
        for path in (REPO / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".yaml"):
                copy = source / path.relative_to(REPO)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(scratch), str(source)]
    ok(run(command, cwd=scratch))
    (built,) = scratch.glob("*.whl")
    return built


@pytest.mark.slow
def test_it_holds_every_module_and_yaml_and_nothing_else(wheel: Path) -> None:
    """Compared with the folders, not with the list in pyproject.toml, from which a new package may be missing."""
    homes = {"gtrain": REPO / "gtrain", "gtrain/conf": REPO / "conf"}
    homes |= {folder.name: folder for folder in (REPO / "plugins").glob("gtrain_*")}
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in homes.items()
        for path in folder.rglob("*")
        if path.suffix in (".py", ".yaml")
    }
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == expected


@pytest.mark.slow
def test_it_runs_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """With the dependencies of the environment that runs the test, which a path file makes visible."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    ok(
        run(
            [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
            cwd=tmp_path,
        )
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    where = ok(run([str(python), "-c", "import gtrain, gtrain_sar; print(gtrain.__file__)"], cwd=empty))
    assert where.stdout.strip() == str(site / "gtrain" / "__init__.py"), show(where)
    ok(run([str(python.with_name("gtrain")), f"trainer.max_epochs={EPOCHS}"], cwd=empty))
    run_dir = only_run(empty)
    content = summary(run_dir)
    assert (content["strategy"], content["data"], content["model"]) == ("sar", "planted", "gcn")
    assert (content["epochs"], content["world_size"]) == (EPOCHS, 2)
    jsonschema.validate(content, json.loads((REPO / "docs" / "summary.schema.json").read_text()))
