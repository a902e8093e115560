"""The wheel holds what the tree holds, and lives beside other packages called `agents` and `graphs`."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", target, ROOT]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (found,) = target.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def tracked_package_files() -> set[str]:
    """Files of the three source folders, under the names they are imported by."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "offset_runtime", "agents", "graphs"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    moved = {f"offset_runtime/{name}" if name.startswith(("agents/", "graphs/")) else name for name in listing}
    return {name for name in moved if not (ROOT / name).is_dir()}


def run_python(code: str, *, cwd: Path, site: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_exactly_the_files_of_the_tree(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert shipped == tracked_package_files()


def test_the_wheel_installs_no_top_level_name_but_its_own(installed: Path) -> None:
    top_level = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}

    assert top_level - {"bin", "__pycache__"} == {"offset_runtime"}


def test_a_users_own_agents_package_and_ours_are_both_imported(installed: Path, tmp_path: Path) -> None:
    for name in ("agents", "graphs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    code = (
        "import agents, graphs, offset_runtime, offset_runtime.agents as a, offset_runtime.graphs as g\n"
        "assert agents.MINE and graphs.MINE\n"
        "assert a.ChatOffset and g.make_graph\n"
        "print(offset_runtime.__file__)"
    )

    result = run_python(code, cwd=tmp_path, site=installed)

    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(installed)


def test_the_links_lead_to_the_top_level_folders() -> None:
    for name in ("agents", "graphs"):
        link = ROOT / "offset_runtime" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name
