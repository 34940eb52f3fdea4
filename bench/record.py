# SPDX-License-Identifier: Apache-2.0
"""Result files: their environment, how they are written, merged, ranked and summed up.

A file holds ``benchmark`` (what kind it is), ``runs`` (environments) and ``rows``, each of which
names its run by number.
"""

import json
import math
import os
import platform
import re
import sys
import time
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("fusedops", "torch", "triton", "transformers", "liger-kernel", "quack-kernels",
            "nvidia-cutlass-dsl", "flash-attn")  # fmt: skip
KEYS = {
    "norms": ("operator", "direction", "rows", "width", "dtype", "provider"),
    "models": ("model", "measure", "sequences", "tokens", "contestant"),
}


def identity(line, benchmark="norms"):
    return tuple(line[key] for key in KEYS[benchmark])


def rank(lines):
    """Set each row's ratio to the best contestant of its case, by share; 1 is the best itself."""
    best = {}
    for line in lines:
        if "share" in line:
            case = identity(line)[:-1]
            best[case] = max(best.get(case, 0.0), line["share"])
    for line in lines:
        if "share" in line:
            line["ratio"] = round(line["share"] / best[identity(line)[:-1]], 4)
    return lines


def summary(lines):
    """Lines of text: fusedops in each operator and direction, and against each other contestant."""
    text = ["share of copy bandwidth (geometric mean, lowest at H), speed against the others"]
    timed = [line for line in lines if "share" in line]
    for group in sorted({group_of(line) for line in timed}):
        members = [line for line in timed if group_of(line) == group]
        ours = {identity(m)[:-1]: m for m in members if m["provider"] == "fusedops"}
        if not ours:
            continue
        low = min(ours.values(), key=lambda m: m["share"])
        against, best = {}, {}
        for other in members:
            case = identity(other)[:-1]
            if other["provider"] == "fusedops" or case not in ours:
                continue
            ratio = ours[case]["share"] / other["share"]
            against.setdefault(other["provider"], []).append(ratio)
            if ratio < best.get(case, (math.inf,))[0]:
                best[case] = ratio, other["provider"], other["rows"], other["width"]
        parts = [f"{' '.join(group):32s} {geometric(m['share'] for m in ours.values()):6.1%}"]
        parts.append(f"low {low['share']:6.1%} at {low['width']:<6d}")
        if best:
            ratio, name, rows, width = min(best.values())
            parts.append(f"vs best {geometric(b[0] for b in best.values()):.3f}")
            parts.append(f"low {ratio:.3f} ({name}, {rows}x{width})")
        parts += [f"{name} {geometric(ratios):.2f}" for name, ratios in sorted(against.items())]
        text.append("  ".join(parts))
    trouble = [line for line in lines if line["status"] in ("wrong", "fails")]
    text += [
        f"{line['status']}: {line['provider']} {line['direction']} {line['operator']} "
        f"{line['rows']}x{line['width']} {line['dtype']}: {line['reason'][:90]}"
        for line in trouble
    ]
    return text


def group_of(line):
    size = "decode" if line["rows"] <= 256 and line["width"] <= 8192 else ""
    return line["operator"], line["direction"], line["dtype"], size


def geometric(values):
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def without_folder(argument):
    """A command's argument as others would give it, who have other folders.

    >>> without_folder("/home/somebody/out.json"), without_folder("bench/run.py")
    ('out.json', 'bench/run.py')
    """
    return Path(argument).name if Path(argument).is_absolute() else argument


def environment(missing):
    """What a result depends on beside the code that is measured."""
    import torch

    from fusedops.environment import driver

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver(),
        "versions": {
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{name: version(name) for name in PACKAGES},
        },
        "missing": missing,
        "commit": commit(),
        "command": " ".join(["python", *map(without_folder, sys.argv)]),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit():
    """The commit at hand; FUSEDOPS_COMMIT names it where only the files were copied."""
    from fusedops import environment as here

    return os.environ.get("FUSEDOPS_COMMIT") or here.commit(RESULTS.parent.parent) or "unknown"


def version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def write(path, content):
    """One row a line: readable differences, at a fraction of the size of an indented file."""
    head = {key: value for key, value in content.items() if key != "rows"}
    lines = ",\n".join(json.dumps(line) for line in content["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}\n')


def merge(contents):
    """One content of several; of rows of one case and contestant the last counts.

    Runs of which nothing is left are dropped.
    """
    benchmarks = {content["benchmark"] for content in contents}
    gpus = {run["gpu"] for content in contents for run in content["runs"]}
    if len(benchmarks) != 1 or not benchmarks <= set(KEYS) or len(gpus) != 1:
        raise ValueError(f"--merge: expected one benchmark on one GPU, got {benchmarks} on {gpus}")
    (benchmark,) = benchmarks
    runs, rows = [], {}
    for content in contents:
        for line in content["rows"]:
            rows[identity(line, benchmark)] = {**line, "run": line["run"] + len(runs)}
        runs += content["runs"]
    left = sorted({line["run"] for line in rows.values()})
    numbered = [{**line, "run": left.index(line["run"])} for line in rows.values()]
    if benchmark == "norms":
        rank(numbered)
    return {"benchmark": benchmark, "runs": [runs[i] for i in left], "rows": numbered}


def default_path(gpu, kind):
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    return RESULTS / f"{name}-{kind}.json"
