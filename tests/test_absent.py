# SPDX-License-Identifier: Apache-2.0
"""Whatever is missing, importing and use on a CPU work, and the message says what it is.

Each of these runs in a process of its own, which finds the source tree by PYTHONPATH.
"""

import importlib.metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from test_packaging import ROOT, run

from fusedops import environment, rms_norm

USE = """\
import torch, fusedops
from fusedops import dispatch

def check(condition):  # `assert` says nothing under -O
    if not condition:
        raise SystemExit("check failed")

x = torch.randn(3, 8, requires_grad=True)
y, summed = fusedops.add_layer_norm(x, x.detach(), torch.ones(8))
y.sum().backward()
check(torch.equal(summed, x + x) and x.grad.shape == x.shape)
obstacle = dispatch.kernel_obstacle(x)
"""

PATCH = """\
from fusedops.integrations import patch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
before = model(x)
check(patch(model).patched == 1 and torch.equal(model(x), before))
"""


def numpy_is_too_new() -> bool:
    """Triton 3.6's interpreter makes numbers of arrays of one, which NumPy refuses from 2.5 on."""
    if not importlib.metadata.version("triton").startswith("3.6."):
        return False
    try:
        return int(np.ones(1)) != 1
    except TypeError:
        return True


interpreted = pytest.mark.skipif(
    numpy_is_too_new(), reason="Triton's interpreter does not know this NumPy"
)


def use(then: str, *options: str, cwd: Path, first: str = "", **extra: str) -> None:
    """Use an operator in a new process that finds the source tree from ``cwd``."""
    run(*options, "-c", first + USE + then, cwd=cwd, PYTHONPATH=str(ROOT), **extra)


def test_import_touches_neither_transformers_nor_cuda(tmp_path: Path) -> None:
    use(
        "check(not loaded & {'transformers', 'rich', 'matplotlib'} and not initialised)",
        first="import sys, fusedops, torch; loaded = {*sys.modules};"
        "initialised = torch.cuda.is_initialized()\n",
        cwd=tmp_path,
    )


@interpreted
def test_runs_optimised(tmp_path: Path) -> None:
    """Without assertions, and all compiled anew; the kernels, too."""
    use(
        "check(not __debug__ and obstacle is None)\n"
        "from fusedops.integrations import patch\n"
        "norm = torch.nn.LayerNorm(8)\n"
        "check(patch(norm).patched == 1 and torch.allclose(norm(summed), y, atol=1e-6))\n",
        "-O",
        cwd=tmp_path,
        TRITON_INTERPRET="1",
    )


def test_disabled_by_the_environment(tmp_path: Path) -> None:
    use("check(obstacle == 'FUSEDOPS_DISABLE is set')", cwd=tmp_path, FUSEDOPS_DISABLE="1")


def test_runs_without_triton(tmp_path: Path) -> None:
    use(
        PATCH + "check('Triton cannot be imported' in obstacle)",
        first="import sys; sys.modules['triton'] = None\n",
        cwd=tmp_path,
    )


NO_LIBRARY = "raise ImportError('DLL load failed while importing libtriton')"


@pytest.mark.parametrize("content", [None, "", NO_LIBRARY])
def test_folder_named_triton_in_the_working_directory(content: str | None, tmp_path: Path) -> None:
    """A folder without ``__init__.py`` hides nothing; one with it hides Triton."""
    (tmp_path / "triton").mkdir()
    if content is not None:
        (tmp_path / "triton" / "__init__.py").write_text(content)
    reason = "" if content is None else "Triton cannot be imported"
    if content == NO_LIBRARY:
        reason += " (ImportError: DLL load failed while importing libtriton)"
    use(PATCH + f"check(obstacle.startswith({reason!r} or 'no kernels'))", cwd=tmp_path)


@interpreted
def test_folders_named_as_ours_in_the_working_directory(tmp_path: Path) -> None:
    for name in ("kernels", "integrations"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not this one')")
    then = "check(obstacle is None)\nimport fusedops.integrations"
    use(then, cwd=tmp_path, TRITON_INTERPRET="1")


OLD_DRIVER = """\
import warnings, torch

def init():
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

def is_available():
    warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old")
    return False

torch.cuda.init = torch.cuda._lazy_init = init
torch.cuda.is_available = is_available
"""


def test_old_driver_is_not_asked(tmp_path: Path) -> None:
    """Where torch says at each question after CUDA that it cannot use the GPU."""
    use(PATCH, "-W", "error::UserWarning", first=OLD_DRIVER, cwd=tmp_path)


def test_no_gpu_visible(tmp_path: Path) -> None:
    use(
        PATCH
        + "from fusedops import environment\n"
        + "found = environment.describe()\n"
        + "check(found['gpus'] == [] and found['no_gpu'])\n"
        + "check(all(set(paths) == {'cpu'} for paths in found['operators'].values()))\n"
        + "check('with TRITON_INTERPRET=1' in obstacle)\n",
        cwd=tmp_path,
        CUDA_VISIBLE_DEVICES="",
    )


def test_info_says_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nUpdate it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    found = environment.describe(probe=False) | {"operators": {}}
    assert "none usable: The NVIDIA driver on your system is too old." in environment.render(found)


NO_HOME = "/dev/null/home"  # which nobody can make, root neither


@interpreted
def test_neither_a_home_nor_a_compiler(tmp_path: Path) -> None:
    """Triton's cache would be in the home; direct.c would be compiled into it."""
    use(
        "check(obstacle is None)\n"
        "from fusedops import direct\n"
        "check(direct.load_native() is None)\n"
        "check('direct.c cannot be used' in ''.join(dispatch._logged))\n",
        cwd=tmp_path,
        HOME=NO_HOME,
        PATH="",
        TRITON_INTERPRET="1",
    )


@pytest.mark.usefixtures("kernels_run")
def test_a_cache_that_cannot_be_written_is_named(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusedops.kernels import launch

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/home/someone/.triton")

    x = torch.ones(2, 8, device=device)
    with monkeypatch.context() as patched:
        patched.setattr(launch, "launch_forward", fail)
        with pytest.raises(RuntimeError, match="Permission denied: '/home/someone/.triton'.*CACHE"):
            rms_norm(x, eps=0.25)
    assert rms_norm(x, eps=0.25).shape == x.shape  # the next call may go well


@pytest.mark.gpu
@pytest.mark.parametrize("missing", ["home", "compiler"])
def test_a_gpu_without(missing: str, tmp_path: Path) -> None:
    """Compiling needs both. What is missing is said, and the CPU is served as before."""
    use(
        "try:\n"
        "    fusedops.rms_norm(x.detach().cuda())\n"
        "except RuntimeError as error:\n"
        f"    check({'TRITON_CACHE_DIR' if missing == 'home' else 'C compiler'!r} in str(error))\n"
        "else:\n"
        "    check(False)\n"
        "fusedops.rms_norm(x)\n",
        first="import os; os.environ.pop('CC', None)\n",
        cwd=tmp_path,
        HOME=NO_HOME if missing == "home" else str(tmp_path),
        **({"PATH": ""} if missing == "compiler" else {}),
    )
