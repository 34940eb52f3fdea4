# SPDX-License-Identifier: Apache-2.0
"""What this machine has and what fusedops does on it: versions, GPUs, memory, paths.

``describe()`` is what ``fusedops info`` prints and what result files carry.
"""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import fusedops
from fusedops import dispatch

__all__ = [
    "available_memory",
    "commit",
    "describe",
    "driver",
    "one_line",
    "operator_paths",
    "render",
]

_PACKAGES = (
    "torch",
    "triton",
    "einops",
    "transformers",
    "accelerate",
    "gguf",
    "rich",
    "matplotlib",
)
_PROBE_ROWS, _PROBE_COLUMNS = 2, 64


def describe(*, probe: bool = True) -> dict[str, Any]:
    """Versions, GPUs, switches and the path of every operator, as plain JSON values.

    Every operator is called once on a tiny tensor of each kind of device here, so the paths are
    seen and not guessed; on a GPU that compiles four small kernels. ``probe=False`` leaves
    them out.

        >>> from fusedops.environment import describe
        >>> sorted(describe()["operators"])
        ['add_layer_norm', 'add_rms_norm', 'layer_norm', 'rms_norm']
    """
    found: dict[str, Any] = {
        "fusedops": fusedops.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": driver(),
        "gpus": _gpus(),
        "no_gpu": _gpu_obstacle(),
        "switches": {
            name: os.environ.get(name) for name in ("FUSEDOPS_DISABLE", "TRITON_INTERPRET")
        },
    }
    if probe:
        found["operators"] = operator_paths()
    return found


def operator_paths() -> dict[str, dict[str, dict[str, str]]]:
    """For each operator and each kind of device here: the path it took, and why.

    ``{"rms_norm": {"cpu": {"path": "reference", "why": "..."}}, ...}``; the path of a call that
    raised is ``"error"`` and the reason its message.
    """
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.insert(0, torch.device("cuda", torch.cuda.current_device()))
    elif torch.backends.mps.is_available():
        devices.insert(0, torch.device("mps"))
    operators = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
    return {
        operator: {str(device): _probe(operator, device) for device in devices}
        for operator in operators
    }


def _probe(operator: str, device: torch.device) -> dict[str, str]:
    x = torch.ones(_PROBE_ROWS, _PROBE_COLUMNS, device=device)
    weight = torch.ones(_PROBE_COLUMNS, device=device)
    arguments = (x, x.clone(), weight) if operator.startswith("add_") else (x, weight)
    try:
        with torch.no_grad(), dispatch.count_calls() as calls:
            getattr(fusedops, operator)(*arguments)
    except Exception as error:  # a broken Triton or driver is a finding here, not a crash
        return {"path": "error", "why": one_line(error)}
    paths = sorted({path for name, path in calls if name == operator})
    obstacle = dispatch.kernel_obstacle(x)
    if obstacle is None:
        obstacle = (
            "TRITON_INTERPRET is set: the kernels run on the CPU"
            if dispatch.INTERPRETED
            else "Triton kernels serve this device"
        )
    return {"path": "+".join(paths) or "unknown", "why": obstacle}


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on ``device`` now, or None where nothing tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    if device.type != "cpu":
        return None
    return min((limit for limit in (_host_memory(), _cgroup_memory()) if limit), default=None)


def render(description: dict[str, Any]) -> str:
    """The description as the plain text that ``fusedops info`` prints."""
    lines = [
        f"fusedops      {description['fusedops']}"
        + (f", commit {description['commit']}" if description["commit"] else ""),
        f"python        {description['python']} on {description['platform']}",
    ]
    for name, version in description["packages"].items():
        lines.append(f"{name:13} {version or 'not installed'}")
    for name in ("cuda", "hip", "driver"):
        if description[name]:
            lines.append(f"{name:13} {description[name]}")
    for index, gpu in enumerate(description["gpus"]):
        lines.append(
            f"{f'gpu {index}':13} {gpu['name']}, compute capability {gpu['capability']}, "
            f"{gpu['memory'] / 2**30:.0f} GiB"
        )
    if not description["gpus"]:
        lines.append(f"{'gpu':13} none usable: {description['no_gpu']}")
    for name, value in description["switches"].items():
        if value is not None:
            lines.append(f"{name}={value}")
    lines += ["", f"{'operator':16}{'device':9}{'path':13}why"]
    for operator, devices in description["operators"].items():
        for device, found in devices.items():
            lines.append(f"{operator:16}{device:9}{found['path']:13}{found['why']}")
    return "\n".join(lines)


def one_line(error: BaseException) -> str:
    """The first line of an error's message that says something, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(root: Path | None = None) -> str | None:
    """The commit of the checkout in ``root``, by default the one that fusedops runs from.

    None where that is no checkout.
    """
    root = root or Path(fusedops.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10")


def driver() -> str | None:
    """The version of NVIDIA's driver."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.strip() or None) if done.returncode == 0 else None


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


def _gpu_obstacle() -> str | None:
    """Why torch can use no GPU: no driver, one that is too old, a build without CUDA."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except Exception as error:
        return one_line(error)
    return "torch finds none"


def _host_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_memory() -> int | None:
    """What a container's limit leaves; the page cache counts as free, as in MemAvailable."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        for line in (root / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])
        return max(int(limit) - used, 0)
    except (OSError, ValueError):
        return None
