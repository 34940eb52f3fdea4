# SPDX-License-Identifier: Apache-2.0
"""Launch every kernel, forward and backward, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        python tests/sanitize_kernels.py --operators rms_norm --dtypes bf16 fp32

Each tensor is then an allocation of its own, so that one element too far is seen. Rows are 1, and
as many as leave the last tile part empty; a head slice gives rows in groups. Results are compared
with float64, too. ``--tool racecheck`` looks at shared memory.
"""

import argparse
import sys

import torch

import fusedops

WIDTHS = (
    1, 17, 64, 96, 128, 256, 512, 768, 1000, 1024, 1600, 2048, 2560, 4096, 5120, 8192, 12288,
    16384, 16400, 32768, 65536, 262144,
)  # fmt: skip
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
OPERATORS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")


def arguments_of(operator, shape, dtype, in_groups):
    """Leaves that need gradients; x a slice of a wider tensor where ``in_groups``."""

    def leaf(*sizes):
        return torch.randn(*sizes, dtype=dtype, device="cuda").requires_grad_()

    x = leaf(*shape[:-1], 2 * shape[-1]) if in_groups else leaf(*shape)
    made = {"x": x[..., : shape[-1]] if in_groups else x}
    if operator.startswith("add"):
        made["residual"] = leaf(*shape)
    made["weight"] = leaf(shape[-1])
    if "layer" in operator:
        made["bias"] = leaf(shape[-1])
    return made


def formula(operator, x, weight, residual=None, bias=None):
    s = x if residual is None else (residual + x)
    if bias is None:
        y = s.double() * (s.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    else:
        y = torch.nn.functional.layer_norm(
            s.double(), s.shape[-1:], weight.double(), bias.double(), 1e-5
        )
    return y if residual is None else (y, s)


def check(operator, shape, dtype, in_groups=False):
    arguments = arguments_of(operator, shape, dtype, in_groups)
    with torch.no_grad():  # launched without the statistics
        function = getattr(fusedops, operator)
        alone = function(**{n: t.detach() for n, t in arguments.items()}, eps=1e-5)
    results = function(**arguments, eps=1e-5)
    expected = formula(operator, **arguments)
    if isinstance(results, torch.Tensor):
        results, expected, alone = (results,), (expected,), (alone,)
    for result, one, truth in zip(results, alone, expected, strict=True):
        assert torch.equal(result, one), "statistics change the result"
        limit = torch.finfo(dtype).eps * 4
        torch.testing.assert_close(result.double(), truth.double(), rtol=limit, atol=limit * 4)
    torch.autograd.backward(results, [torch.randn_like(result) for result in results])
    torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16", "fp32"])
    options = parser.parse_args()
    for operator in options.operators:
        for dtype in options.dtypes:
            for width in options.widths:
                for rows in (1, 67 if width <= 16384 else 5):
                    check(operator, (rows, width), DTYPES[dtype])
                if width <= 4096:
                    check(operator, (3, 5, width), DTYPES[dtype], in_groups=True)
                print(f"{operator} {dtype} {width}: done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
