"""What is released: wheel and sdist are complete and work alone; workflow and container file are sound."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import spear_rl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def package_files() -> set[str]:
    files = (path.relative_to(ROOT / "src") for path in (ROOT / "src" / "spear_rl").rglob("*") if path.is_file())
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


def build(folder: Path, out: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(dist):
    names = names_in(dist[0])
    assert names == package_files()
    assert "spear_rl/py.typed" in names
    kinds = {Path(name).suffix for name in names}
    assert {".py", ".typed", ".toml", ".jinja", ".css", ".js", ".json"} <= kinds
    assert sum(name.startswith("spear_rl/app/presets/") for name in names) > 10


@pytest.mark.slow
def test_the_wheel_says_what_it_is(dist):
    with zipfile.ZipFile(dist[0]) as file:
        [info] = {name.split("/")[0] for name in file.namelist() if ".dist-info/" in name}
        said = email.message_from_bytes(file.read(f"{info}/METADATA"))
        assert "spear = spear_rl.cli:main" in file.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in file.namelist()
    assert (said["Name"], said["Version"]) == ("spear-rl", spear_rl.__version__)
    assert set(said.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert [need for need in said.get_all("Requires-Dist") if "extra ==" not in need] == PROJECT["dependencies"]


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel_and_carries_tests_and_pages(dist, tmp_path):
    with tarfile.open(dist[1]) as file:
        file.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    found = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "docs/index.md", "tests/conftest.py", "Makefile"} <= found
    assert not [name for name in found if "__pycache__" in name or name.startswith(("runs/", ".venv"))]
    build(unpacked, tmp_path / "again")
    [wheel] = (tmp_path / "again").glob("*.whl")
    assert names_in(wheel) == names_in(dist[0])


@pytest.mark.slow
def test_the_wheel_trains_outside_of_the_repository(dist, tmp_path):
    """Unpacked before everything else on the path, with the packages of this environment."""
    with zipfile.ZipFile(dist[0]) as file:
        file.extractall(tmp_path / "site")
    (tmp_path / "work").mkdir()
    more = ["run.steps=1", "sft.episodes=24", "sft.epochs=1", "eval.tasks=4", "rollout.num_tasks=2", "run.threads=1"]
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])}
    where = [sys.executable, "-c", "import spear_rl; print(spear_rl.__file__)"]
    for command in (where, [sys.executable, "-m", "spear_rl.cli", "train", "quickstart", *more]):
        done = subprocess.run(
            command, cwd=tmp_path / "work", env=own, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if command is where:
            assert done.stdout.startswith(str(tmp_path / "site"))
    [summary] = (tmp_path / "work").rglob("summary.json")
    assert summary.stat().st_size > 0


def test_type_information_is_shipped():
    assert (ROOT / "src" / "spear_rl" / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_every_extra_stands_in_the_page_of_releases():
    table = [line for line in (ROOT / "docs" / "release.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`([\w-]+)`", line.split("|")[1])}
    assert named == PROJECT["optional-dependencies"].keys()


def workflow() -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def test_only_the_publishing_job_may_ask_for_a_token_and_it_runs_after_the_others():
    jobs = workflow()["jobs"]
    assert workflow()["permissions"] == {"contents": "read"}
    allowed = {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})}
    assert allowed == {"publish"}
    assert jobs["publish"]["environment"] == "release"
    assert jobs["publish"]["needs"] == "try"
    assert jobs["try"]["needs"] == "build"
    assert not any("run" in step for step in jobs["publish"]["steps"])  # it runs no code of the package
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_the_workflow_runs_on_version_tags_alone():
    triggers = workflow()[True]  # YAML reads `on` as true
    assert triggers == {"push": {"tags": ["v*"]}}


def test_scripts_of_the_workflow_take_nothing_from_an_expression():
    """An expression inside a script is replaced before the shell reads it; a tag may have any name."""
    scripts = [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]
    assert scripts
    assert not [script for script in scripts if "${{" in script]


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments) of the Dockerfile, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def test_the_container_has_a_pinned_base_and_no_root():
    found = instructions()
    [base] = [own for name, own in found if name == "FROM"]
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", base)
    users = [own for name, own in found if name == "USER"]
    assert users[-1].isdigit()
    assert int(users[-1]) > 0
    assert found.index(("USER", users[-1])) < [name for name, _ in found].index("ENTRYPOINT")
    assert not [own for name, own in found if name == "ADD"]


def test_what_the_container_copies_is_there_and_is_all_that_a_build_needs(tmp_path):
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [name for kind, own in instructions() if kind == "COPY" for name in own.split()[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(fnmatch(name, pattern) for pattern in kept), f"{name} is left out by .dockerignore"
    needed = {PROJECT["readme"], "pyproject.toml", "src", "LICENSE"}
    assert needed <= set(copied)


def test_the_container_installs_extras_that_exist():
    found = dict(instructions())
    extras = found["ARG"].removeprefix("EXTRAS=").split(",")
    assert set(extras) <= PROJECT["optional-dependencies"].keys()
    assert "train" in extras


def test_the_linter_of_container_files_finds_nothing():
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
