# SPDX-License-Identifier: Apache-2.0
"""The ``fusedops`` command: ``compare`` proves a patched model equal, ``info`` tells what runs.

Exit status: 0 parity holds (or nothing was to be proven), 1 it fails or is not proven, 2 the
command could not do its work, 130 it was interrupted. How fast a model is does not change it.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import math
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fusedops
from fusedops import dispatch, environment

if TYPE_CHECKING:
    from fusedops.integrations.loading import LoadedModel
    from fusedops.integrations.parity_report import ParityReport
    from fusedops.integrations.timing_report import TimingReport

__all__ = ["main"]

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
_ALIASES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}

_PROMPT = (
    "A river begins as a few drops under a stone, high up where the snow stays until June. Lower "
    "down it turns mills, waters gardens and carries boats; it takes in other rivers and gives "
    "its name to towns. Nobody who stands at its mouth could say which of the drops came from "
    "where, and yet each of them has come the whole way, over every weir and under every bridge."
)


class _CommandError(Exception):
    """Something that the user can put right; the message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own arguments); the exit status."""
    arguments = _parser().parse_args(argv)
    arguments.command_line = ["fusedops", *(sys.argv[1:] if argv is None else argv)]
    try:
        if arguments.command == "info":
            return _info(arguments)
        return _compare(arguments, restart=argv is None)
    except KeyboardInterrupt:
        return _complain("interrupted", status=130)
    except BrokenPipeError:
        # The reader has gone; without this, the interpreter complains again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except Exception as error:
        if arguments.traceback:
            raise
        return _complain(_explain(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusedops", description="Fused residual-add + norm operators for transformers."
    )
    parser.add_argument("--version", action="version", version=fusedops.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    compare = commands.add_parser(
        "compare",
        help="patch a model and prove that it computes the same; --time: how fast it is",
        description="Run a model unpatched, patched, and unpatched in fp32, and compare. The exit "
        "status is 0 only if parity holds. Without a GPU the kernels run under Triton's "
        "interpreter, slowly. With --time, the model is then timed unpatched, with its norms "
        "patched, and with its residual adds fused as well.",
    )
    compare.add_argument(
        "model",
        metavar="MODEL",
        help="hub id, folder, GGUF file, or a built-in random configuration: tiny-llama, "
        "tiny-gpt2, llama-1b, llama-8b, gpt2-small, gpt2-xl, qwen3-0.6b, gemma2-2b, bert-base",
    )
    compare.add_argument(
        "--dtype",
        type=_dtype,
        metavar="{fp32,fp16,bf16,fp64}",
        help="default: bf16 on a GPU, fp32 elsewhere",
    )
    compare.add_argument("--device", help="default: cuda if there is one, else cpu")
    compare.add_argument("--prompt", help="text to run the model on (default: a short one)")
    compare.add_argument(
        "--batch", type=_positive, default=1, help="number of sequences (default: %(default)s)"
    )
    compare.add_argument(
        "--tokens",
        type=_positive,
        help="length of each sequence; the prompt is cut or repeated to fill it (default: the "
        "prompt's length, at least 64)",
    )
    compare.add_argument(
        "--continuation",
        type=_not_negative,
        default=16,
        metavar="TOKENS",
        help="greedy tokens that both models score (default: %(default)s)",
    )
    compare.add_argument("--backward", action="store_true", help="compare gradients, too")
    compare.add_argument("--json", metavar="FILE", help="write the report as JSON")
    compare.add_argument(
        "--html", metavar="FILE", help="write the report as a page that needs no network"
    )
    compare.add_argument("--plot", metavar="FILE", help="save the drift by depth as an image")
    compare.add_argument("--traceback", action="store_true", help="show where an error came from")
    _add_timing_options(compare)

    info = commands.add_parser(
        "info", help="versions, GPU, and the path that each operator takes here, and why"
    )
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument("--traceback", action="store_true", help="show where an error came from")
    return parser


def _add_timing_options(compare: argparse.ArgumentParser) -> None:
    timing = compare.add_argument_group("timing")
    timing.add_argument("--time", action="store_true", help="after the comparison, time the models")
    timing.add_argument(
        "--measure",
        nargs="+",
        choices=("decode", "prefill", "train"),
        help="what to time (default: all three); train is a forward and backward, and each of them",
    )
    timing.add_argument(
        "--decode-batch",
        nargs="+",
        type=_positive,
        metavar="N",
        help="numbers of sequences that decode together (default: 1 16)",
    )
    timing.add_argument(
        "--shape",
        type=_shape,
        metavar="NxTOKENS",
        help="sequences and their length in prefill and train (default: 4x2048, or the model's "
        "positions; 1x64 without a GPU)",
    )
    timing.add_argument(
        "--seconds", type=_seconds, metavar="S", help="time for each thing timed (default: 5)"
    )
    timing.add_argument(
        "--against",
        type=_contestants,
        metavar="{compile,liger}",
        help="also time torch.compile, and Liger's norms in a process of their own; several "
        "joined by a comma",
    )


# --- compare -----------------------------------------------------------------------------------


def _compare(arguments: argparse.Namespace, *, restart: bool) -> int:
    _require("transformers", "hf")
    if arguments.plot:
        _require("matplotlib", "cli")
    if arguments.html:
        _require("jinja2", "cli")
    device = _device(arguments.device)
    dtype = arguments.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)

    from fusedops.integrations import parity_report

    if arguments.tokens and dtype.itemsize < 4:
        tokens = arguments.batch * arguments.tokens
        if tokens < parity_report.MIN_TOKENS:
            raise _CommandError(
                f"--batch times --tokens is {tokens}; below fp32 a comparison needs at least "
                f"{parity_report.MIN_TOKENS} tokens"
            )
    paths = [path for path in (arguments.json, arguments.html, arguments.plot) if path]
    for path in paths:
        parity_report.write_atomically(path)
    files = [
        os.path.realpath(path) for path in paths if not os.path.exists(path) or os.path.isfile(path)
    ]
    if len(set(files)) < len(files):
        raise _CommandError("--json, --html and --plot: expected a file for each, got one for two")
    if arguments.plot:
        parity_report.image_format(arguments.plot)
    timing_options = ("measure", "decode_batch", "shape", "seconds", "against")
    for name in timing_options if not arguments.time else ():
        if getattr(arguments, name) is not None:
            raise _CommandError(f"--{name.replace('_', '-')} says what to time, and needs --time")
    if restart:
        _restart_with_interpreter(device)

    with _progress() as on_step, _quiet():
        on_step(f"loading {arguments.model}", 0, 1)
        loaded, report = _load_and_check(arguments, dtype, device, on_step)
    _show(loaded, report)
    if arguments.plot:
        report.plot(arguments.plot)
    _write(arguments, _all_found(arguments, loaded, report, None))
    timing = None
    if arguments.time:  # whatever becomes of it, the comparison is written already
        with _progress(hint=False) as on_step, _quiet():
            timing = _time(arguments, loaded, device, on_step)
        _show_timing(timing)
        _write(arguments, _all_found(arguments, loaded, report, timing))
    if timing is not None and timing.interrupted:
        return _complain("interrupted", status=130)
    return 0 if report.ok else 1


def _load_and_check(
    arguments: argparse.Namespace,
    dtype: torch.dtype,
    device: torch.device,
    on_step: Callable[[str, int, int], None],
) -> tuple["LoadedModel", "ParityReport"]:
    from fusedops.integrations.loading import load
    from fusedops.integrations.parity import check_parity
    from fusedops.integrations.parity_report import MIN_TOKENS

    loaded = load(arguments.model, dtype, device)
    prompt = _PROMPT if arguments.prompt is None else arguments.prompt
    tokens = arguments.tokens
    if tokens is None:
        own = loaded.prompt_length(prompt) if arguments.prompt is not None else 0
        tokens = max(own, MIN_TOKENS)
    inputs = loaded.inputs(prompt, batch=arguments.batch, tokens=tokens)
    report = check_parity(
        loaded.model,
        inputs,
        backward=arguments.backward,
        continuation=arguments.continuation,
        on_step=on_step,
    )
    return loaded, report


def _time(
    arguments: argparse.Namespace,
    loaded: "LoadedModel",
    device: torch.device,
    on_step: Callable[[str, int, int], None],
) -> "TimingReport":
    from fusedops.integrations.liger import add_liger
    from fusedops.integrations.timing import MEASURES, Plan, time_model

    sequences, tokens = arguments.shape or ((4, 2048) if device.type == "cuda" else (1, 64))
    plan = Plan(
        measures=arguments.measure or MEASURES,
        decode_batches=arguments.decode_batch or (1, 16),
        sequences=sequences,
        tokens=tokens,
        seconds=5.0 if arguments.seconds is None else arguments.seconds,
    )
    against = arguments.against or ()
    here = [name for name in against if name != "liger"]
    timing = time_model(loaded.model, plan, against=here, on_step=on_step)
    if "liger" in against and not timing.interrupted:
        add_liger(timing, loaded.model, arguments.model, plan, on_step)
    return timing


def _show_timing(timing: "TimingReport") -> None:
    print()
    if importlib.util.find_spec("rich") is None or not sys.stdout.isatty():
        print(timing)
        return
    from rich.console import Console

    Console().print(timing)


def _show(loaded: "LoadedModel", report: "ParityReport") -> None:
    print(loaded.source)
    print(report.patch)
    print()
    print(report)
    continuation = _continuation(loaded, report)
    if continuation is not None:
        print(f"continuation: {continuation!r}")


def _continuation(loaded: "LoadedModel", report: "ParityReport") -> str | None:
    if report.continuation is None or loaded.tokenizer is None:
        return None
    return loaded.tokenizer.decode(report.continuation.tokens)


def _all_found(
    arguments: argparse.Namespace,
    loaded: "LoadedModel",
    report: "ParityReport",
    timing: "TimingReport | None",
) -> dict[str, Any]:
    from fusedops.integrations.loading import SEED

    found = {
        "source": loaded.source,
        "batch": arguments.batch,
        "sequence_length": report.tokens // arguments.batch,
        "seed": SEED,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(arguments.command_line),
        "continuation_text": _continuation(loaded, report),
        "environment": environment.describe(probe=False),
        **report.to_dict(),
    }
    if timing is not None:
        found["timing"] = timing.to_dict()
    return found


def _write(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    from fusedops.integrations.parity_report import write_atomically

    if arguments.json:
        text = json.dumps(found, indent=2, allow_nan=False) + "\n"
        write_atomically(arguments.json, lambda file: Path(file).write_text(text))
    if arguments.html:
        from fusedops.integrations.html_report import render

        # Half a surrogate pair, as in arguments that are no text, has no encoding.
        page = render(found).encode(errors="backslashreplace")
        write_atomically(arguments.html, lambda file: Path(file).write_bytes(page))


def _restart_with_interpreter(device: torch.device) -> None:
    """Have the kernels run on the CPU, which Triton decides when they are defined: too late now.

    The same command line is run again in place of this process, with ``TRITON_INTERPRET=1``. A
    user who set that variable, to either value, is obeyed.
    """
    if (
        device.type != "cpu"
        or "TRITON_INTERPRET" in os.environ
        or dispatch.DISABLED
        or dispatch.TRITON_OBSTACLE is not None
    ):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, sys.orig_argv, {**os.environ, "TRITON_INTERPRET": "1"})


@contextlib.contextmanager
def _progress(*, hint: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr; gives the function that moves it.

    A line a step instead where stderr is no terminal, and, with a hint, where rich is missing.
    """
    stream = sys.stderr  # as it is now: it is replaced while other libraries run
    has_rich = importlib.util.find_spec("rich") is not None
    if hint and not has_rich:
        print("no progress bar without rich: pip install 'fusedops[cli]'", file=stream)
    if not has_rich or not stream.isatty():
        yield lambda what, done, total: print(f"... {what}", file=stream, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=1)

        def on_step(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield on_step


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No chatter of other libraries between the progress bar and the tables."""
    from transformers.utils import logging as transformers_logging

    hub = logging.getLogger("huggingface_hub")
    verbosity, hub_level = transformers_logging.get_verbosity(), hub.level
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        # Progress bars that no setting turns off, as that over a GGUF file, write to sys.stderr.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.setLevel(hub_level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


# --- info --------------------------------------------------------------------------------------


def _info(arguments: argparse.Namespace) -> int:
    found = environment.describe()
    print(json.dumps(found, indent=2) if arguments.json else environment.render(found))
    return 0


# --- arguments and errors ----------------------------------------------------------------------


def _dtype(text: str) -> torch.dtype:
    name = _ALIASES.get(text, text)
    if name not in _DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_DTYPES)}, got {text!r}")
    return _DTYPES[name]


def _positive(text: str) -> int:
    return _integer(text, 1)


def _not_negative(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least}, got {text!r}")
    return number


def _shape(text: str) -> tuple[int, int]:
    sequences, separator, tokens = text.partition("x")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected sequences x tokens, as 4x2048, got {text!r}")
    return _positive(sequences), _positive(tokens)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return number


def _contestants(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in ("compile", "liger"):
            raise argparse.ArgumentTypeError(f"expected compile, liger or both, got {name!r}")
    return names


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _CommandError(f"--device {name}: {environment.one_line(error)}") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise _CommandError(f"--device {name}: torch sees {count} CUDA devices here")
    return device


def _require(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise _CommandError(
            f"this command needs {package}, which is not installed: pip install 'fusedops[{extra}]'"
        )


def _explain(error: Exception) -> str:
    line = environment.one_line(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"out of memory; fewer --tokens or a smaller --batch need less ({line})"
    from fusedops.integrations.loading import LoadingError

    if isinstance(error, _CommandError | LoadingError | OSError):
        return line
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{kind}{line} (--traceback shows where)"


def _complain(message: str, *, status: int = 2) -> int:
    print(f"fusedops: error: {message}", file=sys.stderr)
    return status
