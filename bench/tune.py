# SPDX-License-Identifier: Apache-2.0
"""Time launch configurations against each other: where the numbers in kernels/config.py come from.

    python bench/tune.py --out tune.json [--seconds 280] [--directions forward backward]
                         [--operators rms_norm] [--widths 4096 65536] [--names '1x4.*n2$']

The cases, one for each direction, operator and width, go in the order of what is hoped for from
them, until the time is over. All cores but two compile ahead, and drop candidates that spill.
A process of its own times the rest, so that one that hangs costs seconds and not the run. bf16:
2^26 elements, 2^27 from H = 8192 on, by replays of a captured graph, in shares of the copy
bandwidth of that run; forward also 64 rows, in microseconds a launch, each of 16 on its own rows.

A candidate is timed if, on the timed inputs and into outputs full of NaN, its results agree with
float64, come out the same a second time, and each row the same among 64 as among all.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import sys
import time
from typing import NamedTuple

import torch
import triton

from fusedops.kernels import config, launch
from fusedops.kernels.backward import reduce_partials_kernel

OPERATORS = {  # centered, adds
    "rms_norm": (False, False),
    "add_rms_norm": (False, True),
    "layer_norm": (True, False),
    "add_layer_norm": (True, True),
}
DEVICE = "cuda"
FEW_ROWS, LAUNCHES = 64, 16
SPILLS = 32  # registers a thread: without any, nothing would be left of the widest tiles
PATIENCE = 40  # seconds without an answer, after which a candidate hangs
REGISTERS, SHARED_MEMORY = 65536, 228 * 1024  # of a multiprocessor; 1024 bytes go to each program


class Case(NamedTuple):
    direction: str
    operator: str
    width: int

    @property
    def rows(self):
        return (2**26 if self.width < 8192 else 2**27) // self.width


def cases():
    """Most important first."""
    for direction, width in (
        ("backward", 16384), ("forward", 4096), ("backward", 32768), ("forward", 65536),
        ("forward", 32768), ("forward", 8192), ("forward", 16384), ("forward", 2560),
        ("backward", 65536), ("forward", 12288), ("forward", 64), ("forward", 128),
        ("backward", 12288), ("forward", 2048), ("forward", 256), ("forward", 1024),
        ("forward", 5120), ("forward", 131072), ("backward", 131072), ("forward", 512),
        ("backward", 262144), ("backward", 4096), ("backward", 8192), ("backward", 2048),
        ("backward", 1024), ("backward", 5120), ("backward", 256), ("backward", 768),
        ("forward", 768), ("forward", 1600), ("forward", 3072), ("forward", 7168),
        ("backward", 2560), ("backward", 6144), ("backward", 3072), ("backward", 7168),
        ("backward", 1600), ("backward", 3584), ("forward", 3584), ("forward", 6144),
        ("backward", 512), ("backward", 128), ("backward", 64),
    ):  # fmt: skip
        for operator in OPERATORS:
            yield Case(direction, operator, width)


def today(case):
    """The configuration that the table holds now."""
    choose = config.forward_config if case.direction == "forward" else config.backward_config
    return choose(case.width, 2, *OPERATORS[case.operator], launch.gpu_of(torch.device(DEVICE, 0)))


def candidates(case, names=""):
    """Today's configuration, and others whose names the regular expression finds."""
    yield today(case)
    made = forward_candidates if case.direction == "forward" else backward_candidates
    others = list(made(case.width))
    if case.direction == "forward" and OPERATORS[case.operator][0]:
        apart = [dataclasses.replace(one, apart=True) for one in others if one.num_warps > 1]
        others += [one for one in apart if config.warps_apart(one, 2) > 1 and one.slices == 1]
    if case.direction == "forward" and not OPERATORS[case.operator][1]:
        whole = [one for one in others if not launch.is_looped(one, case.width)]
        others += [dataclasses.replace(one, reloaded=True) for one in whole]
    yield from (
        one for one in others if one != today(case) and re.search(names, describe(case, one))
    )


def forward_candidates(width):
    block = config.next_power_of_2(width)
    flags = [(False, False), (False, True), (True, True)]  # weights_first, packed
    if width >= 1024:
        flags.append((True, False))
    for rows, warps in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32)):
        tile = rows * block
        each = tile // (32 * warps)  # elements a thread
        fits = block <= 65536 and (rows == 1 if block >= 2048 else 1024 <= tile <= 4096)
        if fits and 8 <= each <= (32 if rows > 1 else 64):
            for first, packed in flags:
                yield config.LaunchConfig(
                    rows, block, warps, weights_first=first, packed=packed
                )  # fmt: skip
    if width >= 16384:
        for chunk, warps in itertools.product((2048, 4096, 8192, 16384), (8, 16, 32)):
            if chunk < width and 8 <= chunk // (32 * warps) <= 32:
                yield config.LaunchConfig(1, chunk, warps)
    if width >= 32768:
        for slice_block, each in itertools.product((4096, 8192, 16384, 32768), (16, 32, 64)):
            slices = triton.cdiv(width, slice_block)
            if 1 < slices <= 32 and 4 <= slice_block // (32 * each) <= 32:
                for first, packed in flags:
                    yield config.LaunchConfig(
                        1, slice_block, slice_block // (32 * each), slices=slices,
                        weights_first=first, packed=packed,
                    )  # fmt: skip


def backward_candidates(width):
    """With eight warps or more a multiprocessor, and loads as deep as fits."""
    block = config.next_power_of_2(width)
    shared = launch.gpu_of(torch.device(DEVICE, 0)).shared_memory
    tiles, depths = (2048, 4096, 8192, 16384), (3, 4, 5, 6)
    for tile, warps, programs_per_sm, stages in itertools.product(
        tiles, (2, 4, 8, 16), (1, 2, 3, 4), depths
    ):
        rows, each = tile // block, elements_of_thread(width, tile, warps)
        buffers = 2 * tile * 2 * (stages - 1)  # the add forms have half as much again
        crowded = programs_per_sm * buffers > shared or programs_per_sm * warps > 16
        if 1 <= rows <= 128 and 8 <= each <= 48 and programs_per_sm * warps >= 8 and not crowded:
            one = config.LaunchConfig(rows, block, warps, stages, programs_per_sm, packed=True)
            yield one
            if each <= 40:
                yield dataclasses.replace(one, packed=False)
    if width < 5120:
        return
    for block, warps, programs_per_sm in (
        (1024, 2, 8), (2048, 2, 4), (2048, 4, 3), (2048, 4, 4), (2048, 8, 2), (4096, 8, 2),
        (4096, 4, 2), (8192, 8, 1),
    ):  # fmt: skip
        slices = triton.cdiv(width, block)
        # Of shorter rows whole blocks only, and without a wait among the warps, or one is better.
        suits = width >= 12288 or slices * block == width
        if suits and 1 < slices <= config.MAX_SLICES:
            for stages in (3, 4):
                one = config.LaunchConfig(1, block, warps, stages, programs_per_sm, slices)
                if width >= 12288:
                    yield one
                if slices * warps <= 32:  # a message for each thread of the warp that receives them
                    yield dataclasses.replace(one, apart=True)


def elements_of_thread(width, tile, warps):
    """Of a tile; a turn of all threads that begins within the row counts, also beyond its end."""
    block, turn = config.next_power_of_2(width), 32 * warps * 8
    columns = min(block, triton.cdiv(width, turn) * turn)
    return tile // block * columns // (32 * warps)


class Tensors:
    """Inputs and outputs of one case.

    Rows, and the columns along them, differ in scale, so that statistics of another row or slice
    give results that are plainly wrong.
    """

    def __init__(self, case, rows, device=None):
        device = device or DEVICE
        centered, self.adds = OPERATORS[case.operator]
        self.case, self.centered = case, centered

        def rand(*shape):
            return torch.randn(*shape, device=device)

        scale = torch.exp(rand(rows, 1)) * (1.5 + torch.sin(torch.arange(case.width) / 700)).to(
            device
        )
        x = rand(rows, case.width).mul_(scale).add_(rand(rows, 1))
        self.x = x.bfloat16()
        self.other = x.copy_(rand(rows, case.width)).bfloat16() if self.adds else None
        self.dy = x.copy_(rand(rows, case.width)).mul_(1.5 + rand(rows, 1)).bfloat16()
        self.weight = rand(case.width).bfloat16()
        self.bias = rand(case.width).bfloat16() if centered else None
        self.y = torch.empty_like(self.x)
        self.summed = torch.empty_like(self.x) if self.adds else None
        self.dweight = torch.empty_like(self.weight)
        self.dbias = torch.empty_like(self.weight) if centered else None
        statistics = torch.ones(rows, device=device)
        self.rstd, self.mean = statistics, statistics if centered else None
        if case.direction == "backward" and device != "meta":
            moments = [self.moments(part.double()) for part in self.x.split(chunk(case))]
            self.rstd = torch.cat([rstd for _, rstd in moments]).float().flatten()
            if centered:
                self.mean = torch.cat([mean for mean, _ in moments]).float().flatten()

    def part(self, start, rows):
        """Some of the same rows, with outputs of their own."""
        part = object.__new__(Tensors)
        vars(part).update(vars(self))
        chosen = slice(start, start + rows)
        for name in ("x", "other", "dy", "mean", "rstd"):
            tensor = getattr(self, name)
            setattr(part, name, None if tensor is None else tensor[chosen])
        for name in ("y", "summed"):
            tensor = getattr(self, name)
            setattr(part, name, None if tensor is None else torch.empty_like(tensor[chosen]))
        return part

    def moments(self, s):
        mean = s.mean(-1, keepdim=True) if self.centered else torch.zeros_like(s[:, :1])
        return mean, ((s - mean).square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def call(self, chosen):
        """Make the launches with this configuration."""
        if self.case.direction == "forward":
            launch.forward_config = lambda *_: chosen
            launch.launch_forward(
                self.x, self.other, self.weight, self.bias, self.y, self.summed, None, None, 1e-6,
                centered=self.centered, cast_input=False, weight_offset=0.0,
            )  # fmt: skip
        else:
            launch.backward_config = lambda *_: chosen
            launch.launch_backward(
                self.x, self.dy, self.other, self.weight, self.mean, self.rstd,
                self.y, self.dweight, self.dbias, weight_offset=0.0,
            )  # fmt: skip

    def outputs(self):
        found = {"y": self.y}
        if self.case.direction == "forward":
            found["summed"] = self.summed
        else:
            found |= {"dweight": self.dweight, "dbias": self.dbias}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def poison(self):
        for tensor in self.outputs().values():
            tensor.fill_(float("nan"))

    def truth(self):
        """The outputs in float64, (name, rows, values) in groups of rows; dweight, dbias last."""
        dweight = torch.zeros_like(self.weight, dtype=torch.float64)
        dbias = torch.zeros_like(dweight)
        size = chunk(self.case)
        weight = self.weight.double()
        for start in range(0, len(self.x), size):
            rows = slice(start, start + size)
            s = self.x[rows].double()
            other = self.other[rows].double() if self.adds else 0.0
            if self.case.direction == "forward":
                if self.adds:
                    s = (s + other).bfloat16().double()
                    yield "summed", rows, s
                mean, rstd = self.moments(s)
                y = (s - mean) * rstd * weight
                yield "y", rows, y if self.bias is None else y + self.bias.double()
            else:
                dy, rstd = self.dy[rows].double(), self.rstd[rows].double()[:, None]
                x_hat = (s - (self.mean[rows].double()[:, None] if self.centered else 0)) * rstd
                dweight += (dy * x_hat).sum(0)
                dbias += dy.sum(0)
                g = dy * weight
                ds = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
                if self.centered:
                    ds -= g.mean(-1, keepdim=True)
                yield "y", rows, ds * rstd + other
        if self.case.direction == "backward":
            yield "dweight", slice(None), dweight
            yield "dbias", slice(None), dbias

    def wrong(self):
        """The name of an output that is not what float64 gives, or None."""
        found = self.outputs()
        for name, rows, truth in self.truth():
            if name in found:
                unit = truth.square().mean(-1, keepdim=True).sqrt() + truth.abs()
                if not bool(((found[name][rows].double() - truth).abs() <= unit * 2**-7).all()):
                    return name
        return None


def chunk(case):
    """Rows of which float64 copies are made at a time."""
    return max(1, 2**25 // case.width)


def compile_candidate(job):
    """Of the candidate's first kernel (registers a thread, spilled ones, bytes of shared memory).

    Or the error's name.
    """
    case, chosen = job
    captured = []
    gpu = launch.gpu_of(torch.device(DEVICE, 0))  # the tensors are on no device
    launch.run = lambda call, device: captured.append(call)
    launch.gpu_of = lambda device: gpu
    try:
        Tensors(case, 2, "meta").call(chosen)
        for call in captured:
            # Dtypes stand for aligned tensors.
            dtypes = [a.dtype if isinstance(a, torch.Tensor) else a for a in call.arguments]
            compiled = call.kernel.warmup(*dtypes, grid=call.grid, **call.meta)
            if call.kernel is not reduce_partials_kernel:
                compiled._init_handles()
                found = compiled.n_regs, compiled.n_spills, compiled.metadata.shared
        return found
    except Exception as error:  # out of shared memory, for example
        return type(error).__name__


def replay_time(call, repeats=5, replays=4, settle=0.02):
    """Microseconds of a replay, the smallest mean: the one before keeps the GPU busy meanwhile.

    For some milliseconds after the load of the checks everything is up to 15 % slower.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    settled = time.perf_counter() + settle
    while time.perf_counter() < settled:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / replays)
    return min(times)


def copy_bandwidth():
    """TB/s of a device-to-device copy, bytes read and written."""
    source = torch.randn(2**27, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return source.numel() * 4 / replay_time(lambda: target.copy_(source)) * 1e-6


def measure(tensors, chosen):
    """What is found out about one candidate, as a dictionary."""
    case = tensors.case
    tensors.poison()
    tensors.call(chosen)
    wrong = tensors.wrong()
    if wrong:
        return {"error": f"{wrong} is wrong"}
    before = {name: tensor.clone() for name, tensor in tensors.outputs().items()}
    tensors.poison()
    tensors.call(chosen)
    if not all(torch.equal(tensor, before[name]) for name, tensor in tensors.outputs().items()):
        return {"error": "differs from run to run"}
    bits = int(tensors.y.view(torch.int16).sum(dtype=torch.int64))  # the same bits, the same sum
    few = tensors.part(0, FEW_ROWS)
    few.poison()
    few.call(chosen)
    if not torch.equal(few.y, before["y"][:FEW_ROWS]):
        return {"error": "rows depend on their batch"}
    del before
    found = {"us": replay_time(lambda: tensors.call(chosen)), "bits": bits}
    if case.direction == "forward":
        starts = range(0, min(LAUNCHES * FEW_ROWS, case.rows), FEW_ROWS)
        parts = [tensors.part(start, FEW_ROWS) for start in starts]

        def launches():
            for part in parts:
                part.call(chosen)

        found["few_us"] = replay_time(launches) / len(parts)
    return found


def worker(pipe):
    """Answer (case, candidate) with `measure`; None ends it, "copy" asks for the bandwidth."""
    tensors = None
    for job in iter(pipe.recv, None):
        if job == "copy":
            pipe.send((copy_bandwidth(), torch.cuda.get_device_name()))
            continue
        case, chosen = job
        try:
            if tensors is None or tensors.case != case:
                tensors = None  # frees the memory of the last case first
                tensors = Tensors(case, case.rows)
            pipe.send(measure(tensors, chosen))
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {error}"[:200]})


class Timer:
    """The worker's process, made anew after one that hung or died."""

    def __init__(self):
        self.process = None

    def ask(self, job, patience=PATIENCE):
        """The answer, or a dictionary with the error."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=worker, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
        try:
            self.pipe.send(job)
            if self.pipe.poll(patience):
                answer = self.pipe.recv()
                # After an error of CUDA's nothing works in that process any more.
                if not (isinstance(answer, dict) and "CUDA" in answer.get("error", "")):
                    return answer
            else:
                answer = {"error": "hangs"}
        except (EOFError, OSError):
            answer = {"error": "died"}
        self.end()
        return answer

    def end(self):
        if self.process is not None:
            self.process.kill()
            self.process.join(10)
            self.process = None


def describe(case, chosen):
    flags = (
        "w" * chosen.weights_first
        + "p" * chosen.packed
        + "r" * chosen.reloaded
        + "a" * chosen.apart
    )
    slices = f"/s{chosen.slices}" if chosen.slices > 1 else ""
    if launch.is_looped(chosen, case.width):
        slices = f"/c{chosen.block_size}"
    depth = f"q{chosen.num_stages}n{chosen.programs_per_sm}" if chosen.num_stages > 1 else ""
    return f"{chosen.block_rows}x{chosen.num_warps}{flags}{slices}{depth}"


def line(case, found, now):
    """A case in one line: today's, the best of the big size, the best of few rows."""
    name = f"{case.direction[:3]} {case.operator:14s} {case.width:6d}"

    def cell(result):
        few = f"/{result['few_us']:.2f}" if "few_us" in result else ""
        return f"{result['share']:.1f}{few} {result['name']}"

    timed = [result for result in found if "share" in result]
    parts = [cell(result) for result in timed if result["name"] == describe(case, now)][:1] or ["-"]
    parts += [cell(r) for r in sorted(timed, key=lambda r: -r["share"])[:2]]
    if case.direction == "forward":
        parts += [cell(r) for r in sorted(timed, key=lambda r: r.get("few_us", 1e9))[:1]]
    return f"{name} {len(timed)}/{len(found)} " + " | ".join(parts)


def different_bits(found):
    """Candidates whose y has other bits than the one of the same shape without flags."""
    plain = {}
    for result in found:
        if "bits" in result:
            shape = (result["rows"], result["block"], result["warps"], result["slices"])
            plain.setdefault(shape, set()).add(result["bits"])
    return sum(len(bits) > 1 for bits in plain.values())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"])
    parser.add_argument("--operators", nargs="+", default=list(OPERATORS))
    parser.add_argument("--widths", nargs="+", type=int)
    parser.add_argument("--names", default="", help="a regular expression; as in the output")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds

    chosen_cases = [
        case
        for case in cases()
        if case.direction in options.directions
        and case.operator in options.operators
        and (options.widths is None or case.width in options.widths)
    ]
    jobs = list(
        dict.fromkeys((c, one) for c in chosen_cases for one in candidates(c, options.names))
    )
    print(f"{len(jobs)} kernels of {len(chosen_cases)} cases", flush=True)
    cores = max(1, min(16, os.cpu_count() or 1) - 2)
    pool = multiprocessing.get_context("spawn").Pool(cores)
    compiling = zip(jobs, pool.imap(compile_candidate, jobs), strict=True)
    compiled = {}
    timer = Timer()
    answer = timer.ask("copy", 120)
    if isinstance(answer, dict):
        return f"no copy bandwidth: {answer['error']}"
    copy, gpu = answer
    results, lines = [], []

    def save():
        with open(options.out + ".part", "w") as file:
            json.dump({"copy_tb_s": copy, "gpu": gpu, "results": results}, file, indent=0)
        os.replace(options.out + ".part", options.out)

    for case in chosen_cases:
        found = []
        for one in candidates(case, options.names):
            while (case, one) not in compiled and time.monotonic() < end:
                compiled.update([next(compiling)])
            if time.monotonic() > end - 1:
                break
            resources = compiled[case, one]
            result = {
                **case._asdict(), "name": describe(case, one), "rows": one.block_rows,
                "block": one.block_size, "warps": one.num_warps, "stages": one.num_stages,
                "per_sm": one.programs_per_sm, "slices": one.slices,
                "weights_first": one.weights_first, "packed": one.packed,
                "reloaded": one.reloaded, "apart": one.apart,
            }  # fmt: skip
            found.append(result)
            if isinstance(resources, str):
                result["error"] = resources
                continue
            result["registers"], result["spilled"], result["shared"] = resources
            crowd = one.programs_per_sm * max(
                one.num_warps * 32 * result["registers"] / REGISTERS,
                (result["shared"] + 1024) / SHARED_MEMORY,
            )
            if one != today(case):
                if result["spilled"] > SPILLS:
                    result["error"] = "spills"
                    continue
                if one.programs_per_sm > 1 and crowd > 1:
                    result["error"] = "more programs than fit"
                    continue
            result |= timer.ask((case, one), min(PATIENCE, end - time.monotonic()))
            if "us" in result:
                streams = (2 if case.direction == "forward" else 3) + (
                    OPERATORS[case.operator][1] * (2 if case.direction == "forward" else 1)
                )  # x, y (and residual, sum); s, dy, ds (and dsum)
                total = streams * case.rows * case.width * 2
                result["share"] = round(total / result["us"] * 1e-6 / copy * 100, 1)
        results += found
        save()
        failures = {r["error"] for r in found if r.get("error") not in (None, "spills")}
        failures -= {"more programs than fit"}
        if different_bits(found):
            failures.add(f"flags change bits: {different_bits(found)}")
        if found:
            lines.append(line(case, found, today(case)) + f"  {failures}"[:100] * bool(failures))
    print(f"copy {copy:.2f} TB/s. today | best | second | best of few rows: share/us rows x warps")
    print("\n".join(lines), flush=True)
    timer.end()
    pool.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
