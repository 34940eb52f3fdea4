# SPDX-License-Identifier: Apache-2.0
"""Liger's norms in the same model, timed in a process of its own.

Liger changes the modules of transformers themselves, so whoever came after it in one process would
run its code as well. The process loads the model anew and times it unpatched, too: what can be
compared is the ratio of the two there. Of what Liger offers for a model only the norms are put in,
and not its rotary embeddings, MLPs and losses.
"""

import importlib.util
import inspect
import json
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

import torch
from torch import nn

from fusedops.environment import one_line
from fusedops.integrations.loading import load
from fusedops.integrations.timing import (
    NotMeasuredError,
    Plan,
    Step,
    add_timings,
    shared_copy,
    start_report,
)
from fusedops.integrations.timing_report import TimingReport

__all__ = ["add_liger", "main", "with_ligers_norms"]

_MARK = "fusedops-timing "  # begins the lines that are no chatter of other libraries


def add_liger(
    report: TimingReport, model: nn.Module, source: str, plan: Plan, on_step: Step | None = None
) -> None:
    """Add rows of Liger's norms to ``report``, or a note of why there are none.

    ``source`` is what `fusedops.integrations.load` made ``model`` of. Ctrl-C ends the other
    process and sets ``report.interrupted``; rows that had been measured are kept.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        report.note("liger left out: liger-kernel is not installed")
        return
    parameter = next(model.parameters())
    request = {
        "source": source,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "model_type": getattr(getattr(model, "config", None), "model_type", None),
        "plan": asdict(plan),
    }
    if parameter.is_cuda:
        torch.cuda.empty_cache()  # of this process, for the other needs the memory
    command = [sys.executable, "-m", "fusedops.integrations.liger", json.dumps(request)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # the terminal's Ctrl-C is for this process
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_MARK):
                    _receive(report, json.loads(line.removeprefix(_MARK)), on_step)
            if process.wait():
                report.note(f"liger left out: {_last_words(process.returncode, errors)}")
        except KeyboardInterrupt:
            report.interrupted = True
        finally:
            process.kill()  # which does nothing where it has ended
    if any(row.contestant == "liger" for row in report.rows):
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version("liger-kernel")
            report.note(f"Liger's norms are those of liger-kernel {version}")


def _receive(report: TimingReport, message: dict[str, Any], on_step: Step | None) -> None:
    there = TimingReport.from_dict(message["report"])
    for row in there.rows:
        if row.contestant == "liger":
            report.rows.append(replace(row, own_process=True))
    report.profile += [part for part in there.profile if part.contestant == "liger"]
    for note in there.notes:
        report.note(note)
    if on_step is not None:
        what, done, total = message["step"]
        on_step(f"Liger's process: {what}", done, total)


def _last_words(status: int, errors: Any) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    ending = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"its process ended with {ending}" + (f": {lines[-1]}" if lines else "")


# --- in the other process ----------------------------------------------------------------------


def main(request: dict[str, Any]) -> None:
    """Time what ``request`` asks for; what is new goes to stdout at every step."""
    report = TimingReport("", request["dtype"], request["device"], 0.0)
    try:
        apply = _liger_function(request["model_type"])
        _send(report, f"loading {request['source']}", 0, 1)
        dtype = getattr(torch, request["dtype"])
        model = load(request["source"], dtype, request["device"]).model
        plan = Plan(**request["plan"])
        report = start_report(model, plan)
        contestants = {
            "unpatched": shared_copy,
            "liger": lambda model: with_ligers_norms(model, apply),
        }
        add_timings(
            report,
            model,
            contestants,
            plan,
            on_step=lambda what, done, total: _send(report, what, done, total),
        )
    except Exception as error:
        kind = "" if isinstance(error, NotMeasuredError) else f"{type(error).__name__}: "
        report.note(f"liger left out: {kind}{one_line(error)}")
        _send(report, "done", 1, 1)


def _send(report: TimingReport, what: str, done: int, total: int) -> None:
    """Print a step and what ``report`` got since the one before, which it then forgets."""
    message = {"step": [what, done, total], "report": report.to_dict()}
    print(_MARK + json.dumps(message), flush=True)
    report.rows.clear()
    report.profile.clear()
    report.notes.clear()


def _liger_function(model_type: str | None) -> Any:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise NotMeasuredError(f"Liger does not know models of the type {model_type!r}")
    return MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]


def with_ligers_norms(model: nn.Module, apply: Any) -> nn.Module:
    """A copy of ``model`` around its parameters, in which ``apply`` has replaced the norms.

    NotMeasuredError if it replaced none.
    """
    copied = shared_copy(model)
    # All of Liger's switches are booleans: off with everything that is no norm.
    switches = {
        name: name.endswith("_norm")
        for name, parameter in inspect.signature(apply).parameters.items()
        if isinstance(parameter.default, bool)
    }
    apply(model=copied, **switches)
    if not any("forward" in vars(module) for module in copied.modules()):
        raise NotMeasuredError(f"Liger replaces no norm of {type(model).__name__}")
    return copied


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
