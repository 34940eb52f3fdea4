# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel that calls of the operators would launch, for GPUs that are not here.

A program of its own, since the test process has made Triton interpret its kernels. It captures
launches instead of making them, compiles each for each target, and prints one JSON line a kernel.

    python tests/compile_kernels.py --targets cuda:90 hip:gfx942 --widths 64 4096
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedops.kernels import arithmetic, config, launch

TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
OPERATORS = {  # centered, adds
    "rms_norm": (False, False),
    "add_rms_norm": (False, True),
    "layer_norm": (True, False),
    "add_layer_norm": (True, True),
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "num_ctas", "maxnreg", "launch_pdl")


def source_of(kernel, args, meta):
    """The kernel specialised as its launch would specialise it: (ASTSource, options)."""
    options = {name: meta.pop(name) for name in OPTIONS if name in meta}
    values = dict(zip(kernel.arg_names, args, strict=False)) | meta
    exempt = {kernel.arg_names[i] if isinstance(i, int) else i for i in kernel.do_not_specialize}
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        if name.isupper() or value is None:
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp64"
        elif value == 1 and name not in exempt:
            signature[name], constexprs[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            if value % 16 == 0 and name not in exempt:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs, attributes), options


def capture(width, dtype, centered, adds, affine=True):
    """The launches of a forward with statistics and a full backward, as (kernel, args, meta)."""
    launches = []
    launch.run = lambda call, device: launches.append((call.kernel, call.arguments, call.meta))
    rows = 4096  # nothing is allocated: only dtypes and shapes are looked at
    x = torch.empty((rows, width), dtype=dtype, device="meta")
    residual = torch.empty_like(x) if adds else None
    weight = torch.empty(width, dtype=dtype, device="meta") if affine else None
    bias = weight if centered else None
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    rstd = torch.empty(rows, dtype=acc, device="meta")
    mean = rstd if centered else None
    launch.launch_forward(
        x, residual, weight, bias, x, residual, mean, rstd, 1e-6,
        centered=centered, cast_input=False, weight_offset=0.0,
    )  # fmt: skip
    launch.launch_backward(x, x, residual, weight, mean, rstd, x, weight, bias, weight_offset=0.0)
    return launches


def resources(compiled, backend):
    """Registers and spilled bytes a thread, as the assembler reports them."""
    if backend != "cuda":
        return {}
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [dump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    ptx = compiled.asm["ptx"]
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "widest_load": widest_load(ptx),
    }


def widest_load(ptx):
    """Bytes of the widest load from global memory."""
    widths = [0]
    for vector, bits in re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bu](\d+)", ptx):
        widths.append(int(vector or 1) * int(bits) // 8)
    for size in re.findall(
        r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x(\w+)", ptx
    ):
        widths.append(int(size, 16))
    return max(widths)


def gpu_like(target):
    """What configurations depend on, for a GPU of this architecture."""
    if target.backend == "hip":
        return config.Gpu(processors=132, shared_memory=64 * 1024)
    shared = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}[target.arch] * 1024
    return config.Gpu(132, shared, overlaps=target.arch >= 90)


def programs(kernel, width, dtype, centered, adds, gpu):
    """How many of a persistent kernel's programs are to run on a multiprocessor."""
    if kernel.__name__ not in ("norm_backward_kernel", "norm_backward_sliced_kernel"):
        return {}
    chosen = launch.backward_config(width, dtype.itemsize, centered, adds, gpu)
    return {"programs": chosen.programs_per_sm}


def sums_by_warps(*arguments):
    chosen = config.backward_config(*arguments)
    return dataclasses.replace(chosen, apart=chosen.slices > 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--targets", nargs="+", default=["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"]
    )
    parser.add_argument("--widths", nargs="+", type=int, default=[128, 4096, 65536])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"])
    parser.add_argument("--operators", nargs="+", default=list(OPERATORS))
    parser.add_argument("--apart", action="store_true", help="sums by warps, where rows are sliced")
    options = parser.parse_args()
    if options.apart:
        launch.backward_config = sums_by_warps
    for name in options.targets:
        backend, arch = name.split(":")
        target = (
            GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)
        )
        config.NVIDIA = backend == "cuda"
        arithmetic.NVIDIA = tl.constexpr(config.NVIDIA)
        gpu = gpu_like(target)
        launch.gpu_of = lambda device, gpu=gpu: gpu
        config.forward_config.cache_clear()
        config.backward_config.cache_clear()
        for dtype in options.dtypes:
            for width in options.widths:
                for operator in options.operators:
                    centered, adds = OPERATORS[operator]
                    for kernel, args, meta in capture(width, DTYPES[dtype], centered, adds):
                        source, flags = source_of(kernel, args, dict(meta))
                        compiled = triton.compile(source, target=target, options=flags)
                        report = {
                            "target": name, "kernel": kernel.__name__, "dtype": dtype,
                            "width": width, "operator": operator, "warps": flags["num_warps"],
                            "sliced": meta.get("SLICE_COLS", width) < width,
                            "shared": compiled.metadata.shared, **resources(compiled, backend),
                            **programs(kernel, width, DTYPES[dtype], centered, adds, gpu),
                        }  # fmt: skip
                        print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
