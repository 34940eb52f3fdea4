# SPDX-License-Identifier: Apache-2.0
"""GPU time of the operators against other libraries, in shares of the copy bandwidth.

    python bench/run.py                                 the whole set, into bench/results
    python bench/run.py --op rms_norm --shape 16384x4096 --dtype bf16 --provider fusedops torch
    python bench/run.py --merge a.json b.json --out both.json

Everything is compiled first, in parallel. Then, for each case (operator, direction, shape, dtype),
every contestant is checked against float64 on fresh inputs, and those that pass take turns, all in
this process. Two times are taken, medians both, of a captured graph's replay: back to back, and
with 256 MB written between, so that nothing is left in L2. Where a call moves less than 32 MB, the
first graph holds 16 calls on inputs of their own, and the time is a sixteenth of it. A backward is
the backward alone, on what a forward has saved.

What throws or is wrong is recorded, and the run goes on; after an error that leaves the GPU
unusable, in a new process.
"""

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from pathlib import Path

import providers
import record
import torch
from providers import Case, bind
from record import identity

WIDTHS = (
    64, 128, 256, 512, 768, 1024, 1600, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192,
    12288, 16384, 32768, 65536, 131072, 262144,
)  # fmt: skip
DOZEN = (128, 256, 768, 1024, 2048, 3072, 4096, 5120, 8192, 12288, 16384, 65536)
DECODE = tuple(itertools.product((1, 8, 64, 256), (2048, 4096, 8192)))
COMPILED = {
    *((2**26 // width, width) for width in (256, 1024, 2048, 4096, 5120)),
    *((2**27 // width, width) for width in (8192, 12288, 16384, 65536)),
    (1, 4096), (64, 4096), (256, 8192),
}  # fmt: skip
"""Shapes that torch.compile is given, since each takes it seconds."""

SMALL, CALLS = 2**25, 16
FATAL = ("illegal memory", "illegal address", "illegal instruction", "misaligned", "launch failure",
         "device-side assert")  # fmt: skip


def shapes(dtype, widths):
    """(rows, width) of the whole set: 2^26 elements, twice that from 8192 on; then decode."""
    full = dtype == "bf16"
    for width in WIDTHS if full else DOZEN:
        if width in widths:
            yield (2**26 if width < 8192 else 2**27) // width, width
    if full:
        yield from (shape for shape in ((364800, 128), *DECODE) if shape[1] in widths)


def select(options):
    """The cases that the command line asks for, shape by shape."""
    for dtype in options.dtype or providers.DTYPES:
        asked = options.shape or shapes(dtype, options.widths or WIDTHS)
        for (rows, width), operator, direction in itertools.product(
            asked, options.op, options.direction
        ):
            yield Case(operator, direction, rows, width, dtype)


# Compiling ahead -------------------------------------------------------------------------------


def warm(job):
    """In a worker: make one call, so that its kernels are compiled and in the disk caches."""
    name, case = job
    functions, _ = providers.load([name])
    try:
        bind(functions[name](case), case, providers.tensors(case, "cuda"))()
        torch.cuda.synchronize()
    except Exception as error:  # met again, and recorded, when it is measured
        return type(error).__name__
    finally:
        torch.cuda.empty_cache()
    return None


def warm_all(jobs, seconds, n_workers):
    """Give up after ``seconds``: what is not compiled by then will be when it is measured."""
    done, deadline = 0, time.monotonic() + seconds
    # Slow compilers first, so that none is left over at the end.
    jobs.sort(key=lambda job: ("compile", "quack", "flash", "liger", "fusedops").index(job[0]))
    with multiprocessing.get_context("spawn").Pool(min(n_workers, len(jobs))) as pool:
        results = pool.imap_unordered(warm, jobs)
        try:
            while done < len(jobs):  # a worker that dies takes its job along: no waiting for it
                results.next(min(90, max(0.1, deadline - time.monotonic())))
                done += 1
        except multiprocessing.TimeoutError:
            pass
    print(f"compiled ahead: {done} of {len(jobs)}", flush=True)


# Timing ----------------------------------------------------------------------------------------


class GpuTimer:
    """Medians of replays, in microseconds, on a stream of its own that all work shares."""

    def __init__(self, repeats=15, flushed_repeats=7, settle=0.02):
        self.repeats, self.flushed_repeats = repeats, flushed_repeats
        self.settle = settle  # seconds: so long after the checks' load the GPU is 10 % slower
        self.stream = torch.cuda.Stream()
        # Autograd runs a backward where its forward ran: here, where it will be captured.
        torch.cuda.set_stream(self.stream)
        self.pool = torch.cuda.graph_pool_handle()
        self.flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        self.keeps_pool = self.capture([self.flush[:1].zero_])

    def inputs(self, case):
        """How many sets of inputs a case takes: as many as calls go into its graph."""
        return CALLS if case.bytes < SMALL else 1

    def capture(self, calls):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which returns all cached memory to the driver each time.
        graph.capture_begin(pool=self.pool)
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        return graph

    def replay(self, graph, flushed):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if flushed:
            self.flush.zero_()
        torch.cuda._sleep(100_000)  # so that the GPU need not wait for the CPU between the events
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def times(self, contestants):
        """{name: [calls]} -> {name: (back to back, flushed) or the exception}; in turns."""
        graphs, taken, failed = {}, {}, {}
        for name, calls in contestants.items():
            try:
                for call in calls:
                    call()
                many = self.capture(calls)
                graphs[name] = many, self.capture(calls[:1]) if len(calls) > 1 else many
                taken[name] = [], []
            except Exception as error:
                failed[name] = error
                if fatal(error):
                    return failed
        settled = time.perf_counter() + self.settle
        while graphs and time.perf_counter() < settled:
            for many, _ in graphs.values():
                many.replay()
            torch.cuda.synchronize()
        names = [*graphs]
        # All of one kind first: a replay after another contestant's flush would find L2 cold.
        for kind, repeats in enumerate((self.repeats, self.flushed_repeats)):
            for turn in range(repeats + 1 if names else 0):  # the first is for warming up
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    many, one = graphs[name]
                    try:
                        if kind == 0:
                            time_us = self.replay(many, flushed=False) / len(contestants[name])
                        else:
                            time_us = self.replay(one, flushed=True)
                    except Exception as error:  # the GPU's own: nothing after it means anything
                        return {name: error}
                    if turn:
                        taken[name][kind].append(time_us)
        return failed | {n: tuple(map(statistics.median, both)) for n, both in taken.items()}

    def copy_bandwidth(self, elements=2**27):
        """TB/s of a copy of so many bf16 elements, bytes read and written."""
        source = torch.randn(elements, device="cuda", dtype=torch.bfloat16)
        target = torch.empty_like(source)
        (time_us, _) = self.times({"copy": [lambda: target.copy_(source)]})["copy"]
        return source.numel() * 4 / time_us * 1e-6


# Measuring -------------------------------------------------------------------------------------


def row(case, provider, status, **values):
    return {**vars(case), "provider": provider, "status": status, **values}


def brief(error):
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


def fatal(error):
    """Whether the process can use the GPU no more after it; of an exception or its text."""
    text = str(error).lower().replace("_", " ")
    return any(sign in text for sign in FATAL)


def check(case, function, inputs, exact, device):
    """(the call, its largest errors), its results in memory that held NaN before."""
    call = bind(function, case, inputs)
    providers.poison(case, device)
    return call, providers.errors(call(), exact)


def measure(case, functions, timer, copy_tb_s, device="cuda"):
    """The rows of one case; statuses are ok, wrong, fails, not offered and not run."""
    inputs = providers.tensors(case, device)
    exact = providers.truth(case, inputs)
    lines, passed, torchs = {}, {}, {}
    with contextlib.suppress(Exception):  # recorded below, if torch takes part
        torchs = check(case, providers.torch_functions()(case), inputs, exact, device)[1]
    for name, function_of in functions.items():
        if name == "compile" and not is_compiled(case):
            lines[name] = row(case, name, "not run", reason="compiled for a dozen shapes only")
            continue
        try:
            function = function_of(case)
            call, found = check(case, function, inputs, exact, device)
        except providers.NotOfferedError as error:
            lines[name] = row(case, name, "not offered", reason=str(error))
            continue
        except Exception as error:
            lines[name] = row(case, name, "fails", reason=brief(error))
            if fatal(error):
                return [*lines.values()]
            continue
        problem = providers.wrong(found, torchs, exact, case)
        lines[name] = row(case, name, "wrong" if problem else "ok")
        lines[name]["errors"] = {n: float(f"{e:.3g}") for n, e in found.items() if e < math.inf}
        if problem:
            lines[name]["reason"] = problem
        else:
            passed[name] = function, call
    del exact
    others = [providers.tensors(case, device) for _ in range(timer.inputs(case) - 1)]
    results = timer.times(
        {
            name: [call, *(bind(function, case, other) for other in others)]
            for name, (function, call) in passed.items()
        }
    )
    for name, result in results.items():
        if isinstance(result, Exception):
            lines[name].update(status="fails", reason=f"in a captured graph: {brief(result)}")
            continue
        for key, time_us in zip(("", "_flushed"), result, strict=True):
            lines[name]["us" + key] = round(time_us, 3)
            lines[name]["share" + key] = round(case.bytes / time_us * 1e-6 / copy_tb_s, 4)
    # Those that another's failure kept from being timed have no row: they are not done.
    return [line for name, line in lines.items() if name not in passed or name in results]


def is_compiled(case):
    return case.dtype == "bf16" and (case.rows, case.width) in COMPILED


def progress(case, lines):
    parts = [f"{case.direction[:3]} {case.operator:14s} {case.rows}x{case.width} {case.dtype:5s}"]
    for line in lines:
        if "us" in line:
            parts.append(f"{line['provider']} {line['us']:.1f} {line['share']:.0%}")
        elif line["status"] in ("wrong", "fails"):
            parts.append(f"{line['provider']} {line['status']}")
    return "  ".join(parts)


# Command line ----------------------------------------------------------------------------------


def need_gpu(script):
    if not torch.cuda.is_available():
        sys.exit(f"{script} needs a CUDA GPU, and torch {torch.__version__} finds none here")


def shape(text):
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected ROWSxWIDTH, got {text!r}")
    return int(match[1]), int(match[2])


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add, names = parser.add_argument, list(providers.LOADERS)
    add("--op", nargs="+", choices=providers.OPERATORS, default=providers.OPERATORS)
    add("--direction", nargs="+", choices=providers.DIRECTIONS, default=providers.DIRECTIONS)
    add("--shape", nargs="+", type=shape, metavar="ROWSxWIDTH", help="in place of the whole set")
    add("--widths", nargs="+", type=int, help="of the whole set, these widths only")
    add("--dtype", nargs="+", choices=providers.DTYPES)
    add("--provider", nargs="+", choices=names, default=names)
    add("--budget", type=float, default=math.inf, help="seconds, then write what there is")
    workers = min(16, os.cpu_count() or 1)
    add("--workers", type=int, default=workers, help="that compile ahead; 0: nothing is")
    add("--out", type=Path, help="default: bench/results/GPU-run.json")
    add("--merge", nargs="+", type=Path, metavar="FILE", help="into --out; nothing is measured")
    add("--resume", action="store_true", help="go on with what --out lacks")
    return parser.parse_args(arguments)


def benchmark(options, timer, device="cuda", started=None):
    """Measure what is asked for within the budget; write and return the content."""
    started = time.monotonic() if started is None else started
    functions, missing = providers.load(options.provider)
    for name, reason in missing.items():
        print(f"missing: {name} ({reason})", flush=True)
    content = {"benchmark": "norms", "runs": [], "rows": []}
    if options.resume and options.out.exists():
        content = json.loads(options.out.read_text())
    done = {identity(line) for line in content["rows"]}
    copy_tb_s = timer.copy_bandwidth()
    print(f"copy {copy_tb_s:.3f} TB/s", flush=True)
    number, rows = len(content["runs"]), content["rows"]
    # What most of the shapes could reach at best: a copy of as many elements.
    smaller = timer.copy_bandwidth(2**26)
    run = {
        **record.environment(missing),
        "copy_tb_s": round(copy_tb_s, 4),
        "copy_tb_s_of_2^26": round(smaller, 4),
        "left_out": 0,
    }
    content["runs"].append(run)
    for case in select(options):
        if time.monotonic() - started > options.budget:
            run["left_out"] += 1
            continue
        left = {n: f for n, f in functions.items() if identity(row(case, n, "")) not in done}
        if not left:
            continue
        lines = measure(case, left, timer, copy_tb_s, device)
        rows += [{**line, "run": number} for line in lines]
        print(progress(case, lines), flush=True)
        if any(line["status"] == "fails" and fatal(line["reason"]) for line in lines):
            record.write(options.out, content)
            restart(options.budget - (time.monotonic() - started))
        if device == "cuda" and torch.cuda.memory_reserved() > 48 * 2**30:
            torch.cuda.empty_cache()
    record.rank(rows)
    record.write(options.out, content)
    if run["left_out"]:
        print(f"out of time: {run['left_out']} cases left out", flush=True)
    print("\n".join(record.summary(rows)), flush=True)
    return content


def restart(seconds):
    """Go on in a new process: after such an error this one can use the GPU no more."""
    print("the GPU is set up anew", flush=True)
    arguments = ["--resume", "--workers", "0", "--budget", str(seconds)]
    os.execv(sys.executable, [sys.executable, *sys.argv, *arguments])


def main():
    started = time.monotonic()
    options = parse()
    if options.merge:
        content = record.merge([json.loads(path.read_text()) for path in options.merge])
        record.write(options.out or options.merge[0], content)
        print("\n".join(record.summary(content["rows"])))
        return
    need_gpu("bench/run.py")
    options.out = options.out or record.default_path(torch.cuda.get_device_name(), "run")
    if options.workers:
        found, _ = providers.load(options.provider)
        jobs = [
            (name, case)
            for case in select(options)
            for name in found
            if name != "torch" and (name != "compile" or is_compiled(case))
        ]
        if jobs:
            warm_all(jobs, options.budget * 0.4, options.workers)
    benchmark(options, GpuTimer(), started=started)


if __name__ == "__main__":
    main()
