# SPDX-License-Identifier: Apache-2.0
"""Nsight Compute, which runs a script of this folder again, with ``--profile`` and what to do."""

import contextlib
import csv
import io
import subprocess
import sys

import torch


@contextlib.contextmanager
def counted():
    """What is launched within is counted, and nothing else."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def run(script, arguments, metrics, *options, timeout):
    """ncu's CSV about the kernels that the script launches while they are `counted`."""
    command = [
        "ncu", "--csv", "--profile-from-start", "off", "--clock-control", "none", *options,
        "--metrics", ",".join(metrics), sys.executable, script, "--profile", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if '"ID"' not in done.stdout:
        raise RuntimeError(f"ncu: {(done.stdout + done.stderr)[-500:]}")
    return done.stdout


def readings(text):
    """(launch, kernel, metric, unit, value) of each line of that CSV."""
    for line in csv.DictReader(io.StringIO(text[text.index('"ID"') :])):
        value = float(line["Metric Value"].replace(",", ""))
        yield line["ID"], line["Kernel Name"], line["Metric Name"], line["Metric Unit"], value
