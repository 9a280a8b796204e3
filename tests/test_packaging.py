"""What is shipped is what is in the tree: packages, links, wheel, pins; and what it imports is only what it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ckptmgr

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TREE = Path(__file__).resolve().parent.parent
ROOMS = ("backends", "callbacks")
HEAVY = ("awscrt", "boto3", "botocore", "moto", "numpy", "oss2", "torch")

pytestmark = pytest.mark.skipif(not (TREE / "backends").is_dir(), reason="only the tests are here, not the tree")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((TREE / "pyproject.toml").read_text())


def packages_in(package: str, directory: Path) -> Iterator[tuple[str, Path]]:
    """`package` and what lies in it, by dotted name, with the directory of each."""
    yield package, directory
    for child in sorted(directory.iterdir()):
        if (child / "__init__.py").is_file():
            yield from packages_in(f"{package}.{child.name}", child)


def packages_in_tree() -> dict[str, Path]:
    """Every import package of the tree; the rooms are found in their top-level directories."""
    found = dict(packages_in("ckptmgr", TREE / "ckptmgr"))
    for room in ROOMS:
        found.update(packages_in(f"ckptmgr.{room}", TREE / room))
    return found


def tracked_links() -> dict[str, str]:
    """Mode of each link in git's index, by path. Skips the test outside a checkout."""
    if not (TREE / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(TREE), "ls-files", "-s", "ckptmgr/backends", "ckptmgr/callbacks"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split("\t")[1]: line.split()[0] for line in listing.splitlines()}


def test_declared_packages_are_those_of_the_tree(project: dict[str, Any]) -> None:
    """A new package that is not declared would be missing from the wheel."""
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(packages_in_tree())


def test_rooms_are_mapped_to_their_directories(project: dict[str, Any]) -> None:
    """Each room's package lives in the top-level directory that package-dir names."""
    mapping = project["tool"]["setuptools"]["package-dir"]
    assert mapping == {"ckptmgr": "ckptmgr"} | {f"ckptmgr.{room}": room for room in ROOMS}
    assert all((TREE / directory / "__init__.py").is_file() for directory in mapping.values())


def test_links_are_tracked_as_links() -> None:
    """Git keeps the rooms' links as symbolic links (mode 120000), not as copies of what they point to."""
    assert tracked_links() == {f"ckptmgr/{room}": "120000" for room in ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_link_resolves_to_its_room(room: str) -> None:
    """The link in the package leads to the room beside it, by a relative path that survives a move of the tree."""
    tracked_links()
    link = TREE / "ckptmgr" / room
    assert link.readlink() == Path("..") / room
    assert link.resolve() == TREE / room


def test_version_is_the_declared_one(project: dict[str, Any]) -> None:
    """`ckptmgr.__version__` and the package's metadata say the same."""
    assert ckptmgr.__version__ == project["project"]["version"]


def test_wheel_holds_the_tree_and_nothing_beside_it(project: dict[str, Any], tmp_path: Path) -> None:
    """One top-level package, every module of the tree in it, the licence and the type marker: no stray `callbacks`."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(TREE / name, source)
    for name in ("ckptmgr", *ROOMS):
        shutil.copytree(TREE / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(source)]
    built = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr

    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"ckptmgr-{ckptmgr.__version__}.dist-info/entry_points.txt").decode()
    info = f"ckptmgr-{ckptmgr.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"ckptmgr", info}
    modules = {
        f"{package.replace('.', '/')}/{module.name}"
        for package, directory in packages_in_tree().items()
        for module in directory.glob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    assert {"ckptmgr/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert "ckptmgr = ckptmgr.cli.main:main" in entry_points


def test_every_requirement_is_pinned_in_constraints(project: dict[str, Any]) -> None:
    """What pyproject.toml asks for is in constraints.txt, with a release that satisfies it."""
    lines = [line for line in (TREE / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}
    extras = project["project"]["optional-dependencies"].values()
    asked = [Requirement(line) for group in (project["project"]["dependencies"], *extras) for line in group]
    # What only another Python needs is not in an environment of the one that the file was written with.
    wanted = [asks for asks in asked if asks.marker is None and canonicalize_name(asks.name) != "ckptmgr"]
    assert all(re.fullmatch(r"==[^,*]+", str(pin.specifier)) for pin in pins.values())
    missing = [
        str(requirement)
        for requirement in wanted
        if (pin := pins.get(canonicalize_name(requirement.name))) is None
        or not requirement.specifier.contains(str(pin.specifier).removeprefix("=="), prereleases=True)
    ]
    assert missing == []


# --- what is imported ---------------------------------------------------------------------------------------------------

AT_EXIT = f"""
import atexit, sys
atexit.register(lambda: print("heavy:", *sorted(sys.modules.keys() & set({HEAVY!r})), file=sys.stderr))
"""


def heavy_imports(code: str, *arguments: str) -> str:
    """Which of HEAVY are loaded when a new interpreter has run `code`, which must end well."""
    command = [sys.executable, "-c", AT_EXIT + code, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1].removeprefix("heavy:").strip()


def heavy_imports_of_command(*arguments: str) -> str:
    """The same, of one command of ckptmgr."""
    return heavy_imports("from ckptmgr.cli.main import main; main()", *arguments)


@pytest.fixture(scope="module")
def run_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of one checkpoint in a local store."""
    root = tmp_path_factory.mktemp("store")
    checkpoint = root / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "model.bin").write_bytes(b"weights")
    url = (root / "store" / "run").as_uri()
    # Checksums of another kind than BLAKE3 come from awscrt where it is installed: whoever reads bytes may load it.
    assert heavy_imports_of_command("push", str(checkpoint), url) in ("", "awscrt")
    return url


def test_the_check_itself_sees_an_import() -> None:
    """The tests below can fail."""
    assert heavy_imports("import numpy") == "numpy"


@pytest.mark.parametrize(
    "code", ["import ckptmgr", "import ckptmgr.backends, ckptmgr.cli.main, ckptmgr.core, ckptmgr.run, ckptmgr.transfer"]
)
def test_import_loads_neither_torch_nor_a_cloud_library(code: str) -> None:
    """Listing and pruning run on machines without PyTorch, and start fast where there is one."""
    assert heavy_imports(code) == ""


@pytest.mark.parametrize("arguments", [["--help"], ["ls", "--help"], ["resume", "--help"]])
def test_help_loads_neither_torch_nor_a_cloud_library(arguments: list[str]) -> None:
    """Not even numpy."""
    assert heavy_imports_of_command(*arguments) == ""


@pytest.mark.parametrize("arguments", [["ls"], ["show"], ["prune", "--keep-last=1"]])
def test_commands_that_read_manifests_load_neither_torch_nor_a_cloud_library(
    arguments: list[str], run_url: str
) -> None:
    """On a local store, what looks at manifests only needs no library but fsspec."""
    command, *options = arguments
    assert heavy_imports_of_command(command, run_url, *options) == ""


@pytest.mark.parametrize("arguments", [["verify"], ["resume", "--to={tmp}/resumed"]])
def test_commands_that_read_data_load_neither_torch_nor_a_cloud_library(
    arguments: list[str], run_url: str, tmp_path: Path
) -> None:
    """On a local store, what checks bytes needs checksums (awscrt's where it is installed), and neither torch nor boto3."""
    command, *options = [argument.format(tmp=tmp_path) for argument in arguments]
    assert heavy_imports_of_command(command, run_url, *options) in ("", "awscrt")
