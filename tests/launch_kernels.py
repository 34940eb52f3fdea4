# SPDX-License-Identifier: Apache-2.0
"""Compare launches through direct.c with those that Triton makes, on tests/fake_driver.c.

A program of its own, since the test process has made Triton interpret its kernels. It compiles the
kernels of forwards and backwards for a GPU that is not here, launches each through Triton and
through what `fusedops.direct` makes of it, on the same pointers, and prints how many were alike.
"""

import ctypes
import sys
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from fusedops import direct, direct_backward
from fusedops.autograd import Spec
from fusedops.kernels import config, launch

STREAM = 7
HOPPER = config.Gpu(132, 227 * 1024, overlaps=True)
SIZES = {"i32": 4, "i64": 8, "fp32": 4, "fp64": 8}  # and 8 of pointers


class Driver:
    """As much of Triton's driver as a launch asks for; the tensors are on the CPU."""

    def __init__(self) -> None:
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = nvidia.CudaLauncher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def map_python_to_cpp_type(self, kind: str) -> str:
        return nvidia.ty_to_cpp(kind)


cuda = ctypes.CDLL("libcuda.so.1")


def expect(compiled: Any) -> None:
    """Tell the driver which parameters the launches to come have."""
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    sizes = [SIZES.get(kind, 8) for kind in kinds] + [8, 8]  # and two pointers to scratch memory
    cuda.expect(len(sizes), (ctypes.c_size_t * len(sizes))(*sizes))


def take() -> list[int]:
    """The words of the last launch."""
    words = (ctypes.c_ulonglong * 128)()
    return list(words[: cuda.take(words)])


def split(call: launch.Call, varying: str) -> tuple[list[Any], tuple[Any, ...]]:
    """Arguments up to the one of that name, with pointers for tensors; the rest and constants."""
    names = call.kernel.arg_names
    place = names.index(varying) + 1
    given = [a.data_ptr() if isinstance(a, Tensor) else a for a in call.arguments[:place]]
    constants = [call.meta[name] for name in names if name in call.meta]
    return given, (*call.arguments[place:], *constants)


def compare(call: launch.Call, varying: str) -> None:
    """A launch by Triton, by direct.c, and as it is made without direct.c."""
    kernel = direct.compile_call(call, varying)
    assert type(kernel.launch) is direct.load_native().Launcher
    expect(kernel.compiled)
    call.kernel[call.grid](*call.arguments, **call.meta)
    by_triton = take()
    given, tail = split(call, varying)
    x, y = (*call.grid, 1)[:2]
    kernel.launch.launch(x, y, STREAM, *given)
    by_us = take()
    entry, head, tail = direct._triton_entry(kernel.compiled, tail)
    entry(x, y, 1, STREAM, *head, *given, *tail)
    by_entry = take()
    assert by_us == by_entry == by_triton, (call, by_triton, by_entry, by_us)
    assert len(by_us) > 12


def compare_operator(width: int, dtype: torch.dtype, *, centered: bool, adds: bool) -> int:
    """The number of launches, forward and backward."""
    x = torch.empty(150, width, dtype=dtype)
    residual = torch.empty_like(x) if adds else None
    weight = torch.empty(width, dtype=dtype)
    bias = weight.clone() if centered else None
    rstd = torch.empty(len(x), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    mean = rstd.clone() if centered else None
    y, summed = x.clone(), None if residual is None else x.clone()
    forward = launch.prepare_forward(
        x, residual, weight, bias, y, summed, mean, rstd, 1e-6,
        centered=centered, cast_input=False, weight_offset=0.5,
    )  # fmt: skip
    backward = launch.prepare_backward(
        x, y, summed, weight, mean, rstd, x.clone(), weight.clone(),
        None if bias is None else bias.clone(), weight_offset=0.5,
    )  # fmt: skip
    assert backward.reduction is not None
    calls = [(forward, "n_rows"), (backward.calls[0], "n_rows"), (backward.reduction, "n_partials")]
    for call, varying in calls:
        compare(call, varying)
    return len(calls)


def check_errors_and_threads(call: launch.Call) -> None:
    """What the driver says comes through; a thread without a context is given the kernel's."""
    kernel = direct.compile_call(call, "n_rows")
    given, tail = split(call, "n_rows")
    cuda.bind(ctypes.c_ulonglong(0))
    kernel.launch.launch(3, 1, STREAM, *given)
    assert take()[1] == 1  # the context that was bound when the kernel was compiled
    assert direct._own_entry(kernel.compiled, tail) is not None
    cuda.bind(ctypes.c_ulonglong(0))
    assert direct._own_entry(kernel.compiled, tail) is None  # there is no context to remember
    cuda.bind(ctypes.c_ulonglong(1))
    launcher = kernel.compiled.run
    if hasattr(launcher, "kernel_signature"):  # parameters that Triton alone knows of
        launcher.kernel_signature += b"\0"
        assert direct._own_entry(kernel.compiled, tail) is None
        launcher.kernel_signature = launcher.kernel_signature[:-1]
    cuda.fail(701)
    with pytest.raises(RuntimeError, match=r"as the test wants it \(error 701\)"):
        kernel.launch.launch(3, 1, STREAM, *given)
    cuda.fail(0)
    for wrong in ((3, 1, STREAM, *given[:-1]), (3, 1), (0, 1, STREAM, *given), ("3", 1, 7, *given)):
        with pytest.raises(TypeError):
            kernel.launch.launch(*wrong)
        assert take() == []


def check_calls(width: int) -> None:
    """A forward and a backward from C, by tensors; what they allocate is known by its pointers."""
    direct._current_device, direct._current_stream = torch.zeros(1).get_device, lambda _: STREAM
    direct._empty = torch._C._dynamo.guards._empty_strided_cpu
    replaced = ("current_device", "current_stream", "empty")
    native = direct.load_native()
    native.configure(**{name: getattr(direct, f"_{name}") for name in replaced})
    x, residual = torch.randn(2, 300, width).half()
    weight, bias = torch.randn(2, width).half()
    options, spec = ("add_layer_norm",), Spec(True, False, 0.0, x.dtype, True)
    with torch.no_grad():
        direct._plan(options, x, residual, weight, bias, 1e-6, spec, None)
        (((made, _),),) = direct._plans.values()
        expect(made.kernel.compiled)
        y, summed = direct.norm(options, x, residual, weight, bias)
    by_us = take()
    forward = launch.prepare_forward(
        x, residual, weight, bias, y, summed, None, None, 1e-6,
        centered=True, cast_input=False, weight_offset=0.0,
    )  # fmt: skip
    forward.kernel[forward.grid](*forward.arguments, **forward.meta)
    assert by_us == take()

    mean, rstd = torch.randn(len(x)), torch.randn(len(x))
    saved, wanted = (x, weight, mean, rstd, 0.0), (True, x.dtype, x.dtype)
    plan = direct_backward._plan(y, summed, saved, wanted)
    assert plan is not None
    expect(plan.kept[-1])  # the kernel that sums up
    dx, dweight, dbias = direct.launch_backward(plan, wanted, y, summed, *saved[:-1])
    by_us = take()
    backward = launch.prepare_backward(
        x, y, summed, weight, mean, rstd, dx, dweight, dbias, weight_offset=0.0
    )
    reduction = backward.reduction
    assert reduction is not None
    assert not backward.alone
    reduction.kernel[reduction.grid](*reduction.arguments, **reduction.meta)
    by_triton = take()
    n_parameters = 8  # two partial sums, two gradients, two numbers, two of scratch memory
    first = len(by_us) - n_parameters
    assert by_us[:first] == by_triton[:first]
    assert by_us[first + 2 :] == by_triton[first + 2 :]  # the partial sums are elsewhere


def main() -> int:
    triton.runtime.driver.set_active(Driver())
    launch.gpu_of = lambda device: HOPPER
    compared = 0
    for width, dtype in ((4096, torch.bfloat16), (1000, torch.float16), (256, torch.float32)):
        for centered in (False, True):
            for adds in (False, True):
                compared += compare_operator(width, dtype, centered=centered, adds=adds)
    x, weight = torch.empty(5, 64), torch.empty(64)
    call = launch.prepare_forward(
        x, None, weight, None, x.clone(), None, None, None, 1e-6,
        centered=False, cast_input=False, weight_offset=0.0,
    )  # fmt: skip
    check_errors_and_threads(call)
    check_calls(512)
    print(compared)
    return 0


if __name__ == "__main__":
    sys.exit(main())
