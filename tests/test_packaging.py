# SPDX-License-Identifier: Apache-2.0
"""The package as users get it: wheel, sdist, editable, or a checkout that nobody installed.

kernels/ is the hazard. transformers looks for PyPI's package of that name, and a folder with an
``__init__.py`` would be taken for it whenever the checkout's root is on ``sys.path``. A stand-in
for the PyPI package is enough to see that: it has the name, a version that transformers accepts,
and whatever transformers asks of it.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from email.parser import Parser
from pathlib import Path
from textwrap import indent

import pytest

import fusedops

ROOT = Path(__file__).resolve().parent.parent
# Where each source folder goes in the package.
PACKAGES = {
    "fusedops": "fusedops",
    "kernels": "fusedops/kernels",
    "integrations": "fusedops/integrations",
}

STAND_IN = """\
from unittest.mock import MagicMock

def use_kernel_forward_from_hub(name):
    return lambda cls: cls

def use_kernelized_func(*names):
    return lambda cls: cls

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
"""

PROBE = """\
import os
from pathlib import Path
import fusedops, fusedops.integrations, fusedops.kernels.config
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available

for module in (fusedops, fusedops.integrations, fusedops.kernels.config):
    assert Path(module.__file__).is_relative_to(os.environ["EXPECT_UNDER"]), module.__file__
assert is_kernels_available() == (os.environ["EXPECT_KERNELS"] == "with")
assert isinstance(LlamaForCausalLM, type)
"""

# Another editable install, as `make test` makes one, must not be what is found.
ACTIVATE = """\
import site, sys
for name in [name for name in sys.modules if name.startswith("__editable___fusedops")]:
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder.__module__ != name]
    del sys.modules[name]
sys.path.insert(0, {site!r})
site.addsitedir({site!r})
"""


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without what conftest and CI put in, so that defaults are what is tested."""
    drop = ("PYTHONPATH", "TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_HOME", "USE_HUB_KERNELS")
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in drop and not name.startswith("FUSEDOPS_")
    }
    return env | {"PYTHONDONTWRITEBYTECODE": "1"} | extra


def run(*arguments: str | Path, cwd: Path, **extra: str) -> str:
    """Run this Python in a new process; its output, or a failure that shows it."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=clean_environment(**extra),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, so that builds leave nothing behind in the real one."""
    copy = tmp_path_factory.mktemp("checkout") / "fusedops-src"
    copy.mkdir()
    for entry in ROOT.iterdir():
        if entry.is_file() and not entry.name.startswith("."):
            shutil.copy(entry, copy)
        elif entry.name in (*PACKAGES, "tests", "bench", "docs", "examples"):
            shutil.copytree(entry, copy / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def dist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built out of it."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", folder, checkout, cwd=checkout)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the wheel."""
    target = tmp_path_factory.mktemp("installed")
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target)
    run(*install, wheel, cwd=target)
    return target


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site folder with an editable install of the checkout."""
    site = tmp_path_factory.mktemp("editable")
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    run("-c", build, site, cwd=checkout)
    (path,) = site.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)
    return site


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a package called kernels, as `pip install kernels` leaves it."""
    from transformers.utils import import_utils

    version = getattr(import_utils, "KERNELS_MIN_VERSION", "0.11.0")
    site = tmp_path_factory.mktemp("stand-in")
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text(STAND_IN)
    metadata = site / f"kernels-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"
    )
    return site


def sources() -> set[str]:
    """The files that a wheel must hold, by their place in it."""
    return {
        f"{place}/{path.name}"
        for folder, place in PACKAGES.items()
        for path in (ROOT / folder).iterdir()
        if path.suffix in (".py", ".c", ".jinja", ".css") or path.name == "py.typed"
    }


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (licence,) = (name for name in archive.namelist() if name.endswith("LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert names == sources()
    assert {"fusedops/py.typed", "fusedops/direct.c"} <= set(names)
    assert "fusedops/kernels/__init__.py" not in names


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "fusedops"
    assert metadata["Version"] == fusedops.__version__
    assert "Apache-2.0" in (metadata["License-Expression"] or metadata["License"])
    required = [value for value in metadata.get_all("Requires-Dist") if "extra ==" not in value]
    assert sorted(value.split(">")[0] for value in required) == ["einops", "torch", "triton"]
    assert set(metadata.get_all("Provides-Extra")) >= {"hf", "cli", "test", "bench"}


def test_sdist_holds_what_the_tests_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tests = {f"tests/{path.name}" for path in (ROOT / "tests").glob("*.py")}
    project = {"setup.cfg", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile"}
    assert names >= tests | project | {"constraints.txt", "ruff.toml"}
    assert "kernels/__init__.py" not in names


def test_wheel_built_straight_from_the_tree_is_the_same(
    wheel: Path, checkout: Path, tmp_path: Path
) -> None:
    run("-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, checkout, cwd=checkout)
    (direct,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(direct) as one, zipfile.ZipFile(wheel) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        assert all(one.read(name) == other.read(name) for name in sources())


class TestTransformersBesideUs:
    """``from transformers import LlamaForCausalLM`` with and without PyPI's kernels installed.

    Each probe costs seconds. The two left out are what this suite itself is: pytest at the root,
    in an environment with an editable install and without kernels.
    """

    both = pytest.mark.parametrize("kernels", ["with", "without"])
    one = pytest.mark.parametrize("kernels", ["with"])

    @pytest.fixture
    def probe(self, kernels: str, stand_in: Path) -> Callable[..., str]:
        def probe(*arguments: str, cwd: Path, under: Path, path: Sequence[Path] = ()) -> str:
            entries = [*path, stand_in] if kernels == "with" else path
            return run(
                *arguments,
                cwd=cwd,
                PYTHONPATH=os.pathsep.join(map(str, entries)),
                EXPECT_UNDER=str(under),
                EXPECT_KERNELS=kernels,
            )

        return probe

    @both
    def test_checkout(self, probe: Callable[..., str], checkout: Path) -> None:
        probe("-c", PROBE, cwd=checkout, under=checkout)

    @one
    def test_checkout_under_pytest(self, probe: Callable[..., str], checkout: Path) -> None:
        test = checkout / "tests" / "test_probe.py"
        test.write_text(f"def test_probe():\n{indent(PROBE, '    ')}")
        options = ("-q", "-p", "no:cacheprovider", "-W", "default", "tests/test_probe.py")
        try:
            assert "1 passed" in probe("-m", "pytest", *options, cwd=checkout, under=checkout)
        finally:
            test.unlink()

    @both
    def test_installed(self, probe: Callable[..., str], installed: Path, tmp_path: Path) -> None:
        probe("-c", PROBE, cwd=tmp_path, under=installed, path=[installed])

    @one
    def test_editable(
        self, probe: Callable[..., str], editable: Path, checkout: Path, tmp_path: Path
    ) -> None:
        activate = ACTIVATE.format(site=str(editable))
        probe("-c", activate + PROBE, cwd=tmp_path, under=checkout)
