# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the device, the interpreter, the operators and their exact values.

Without a GPU the kernels run on the CPU under Triton's interpreter, at smaller sizes.
``TRITON_INTERPRET=0 pytest`` runs the same tests against the plain torch reference instead.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when kernels are defined

import fusedops  # noqa: E402
from fusedops import direct, direct_backward, dispatch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``gpu`` skips where there is no CUDA device, ``gpu(2)`` where there are fewer than two."""
    present = torch.cuda.device_count() if ON_GPU else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = marker.args[0] if marker and marker.args else 1
        if marker and present < needed:
            reason = f"needs {needed} CUDA device(s), {present} present"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture(scope="session")
def path() -> str:
    """The path on which calls with tensors on ``device`` must run."""
    if ON_GPU:
        return "triton"
    return "interpreter" if dispatch.INTERPRETED else "reference"


@pytest.fixture(scope="session")
def kernels_run(path: str) -> None:
    """For promises that only the kernels make."""
    if path == "reference":
        pytest.skip("the kernels do not run here")


@pytest.fixture(autouse=True)
def streams_for_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests' models are small: on a GPU their adds would not be fused."""
    from fusedops.integrations import stream

    monkeypatch.setattr(stream, "MIN_ELEMENTS", 0)


@pytest.fixture(scope="module")
def tree_sums() -> Iterator[None]:
    """Make the interpreter add up in a tree along every axis, as GPUs do.

    numpy does so along the innermost axis only; along others it keeps a running sum, whose error
    grows with the length of the row.
    """
    if ON_GPU or not dispatch.INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    original = interpreter.ReduceOps.sum

    def tree(self: Any, values: Any) -> Any:
        data = values.handle.data
        if self.axis is None:
            return original(self, values)
        data = np.ascontiguousarray(np.moveaxis(data, self.axis, -1)).sum(-1)
        if self.keep_dims:
            data = np.expand_dims(data, self.axis)
        return self.to_tensor(data, values.dtype)

    interpreter.ReduceOps.sum = tree
    try:
        yield
    finally:
        interpreter.ReduceOps.sum = original


@pytest.fixture
def interrupted_turns(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Ctrl-C in the second case of a timing; the seconds that its cases were given."""
    from fusedops.integrations import timing

    take_turns = timing.take_turns
    calls: list[float] = []

    def interrupted(works: Any, seconds: float) -> Any:
        calls.append(seconds)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return take_turns(works, 0.0)

    monkeypatch.setattr(timing, "take_turns", interrupted)
    return calls


@pytest.fixture
def fresh_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is launched by what the calls of other tests have left behind."""
    monkeypatch.setattr(direct, "_plans", {})
    monkeypatch.setattr(direct, "_kernels", {})
    monkeypatch.setattr(direct_backward, "_plans", {})


@pytest.fixture
def small_blocks(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of more than this many elements are walked over in chunks, as very long ones are."""
    from fusedops.kernels import launch
    from fusedops.kernels.config import LaunchConfig

    config = LaunchConfig(block_rows=1, block_size=64, num_warps=4)
    for name in ("forward_config", "backward_config"):
        monkeypatch.setattr(launch, name, lambda *_: config)
    return config.block_size


@pytest.fixture
def wide_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients in wide blocks of columns: the interpreter takes milliseconds a program."""
    if ON_GPU:
        return
    from fusedops.kernels import launch
    from fusedops.kernels.config import LaunchConfig

    config = LaunchConfig(block_rows=4, block_size=32768, num_warps=4)
    for name in ("reduce_config", "weight_gradient_config"):
        monkeypatch.setattr(launch, name, lambda *_: config)


# What each output and gradient is compared with -----------------------------------------------


@dataclass(frozen=True)
class Result:
    """One forward and backward: y, summed (None without a residual) and gradients by name."""

    y: Any
    summed: Any
    grads: Mapping[str, Any]


@dataclass(frozen=True)
class Operator:
    """One of the four public functions and how to call it."""

    name: str
    adds: bool
    centers: bool

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(fusedops, self.name)

    @property
    def reference(self) -> Callable[..., Any]:
        return getattr(fusedops.reference, self.name)

    @property
    def argument_names(self) -> list[str]:
        residual = ["residual"] if self.adds else []
        return ["x", *residual, "weight", *(["bias"] if self.centers else [])]

    def inputs(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        *,
        residual_dtype: torch.dtype | None = None,
        weight_dtype: torch.dtype | None = None,
    ) -> dict[str, Tensor | None]:
        """Random arguments: rows with a mean of their own, weights of both signs."""
        made = {
            "x": torch.randn(shape) + torch.randn(*shape[:-1], 1),
            "residual": 2 * torch.randn(shape),
            "weight": torch.randn(shape[-1]),
            "bias": torch.randn(shape[-1]),
        }
        dtypes = {
            "x": dtype,
            "residual": residual_dtype or dtype,
            "weight": weight_dtype or dtype,
            "bias": weight_dtype or dtype,
        }
        return {n: made[n].to(device=device, dtype=dtypes[n]) for n in self.argument_names}

    def call(
        self, inputs: Mapping[str, Tensor | None], function: Any = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(y, summed) of ``function``, by default the public one; summed None without add."""
        out = (function or self.function)(**inputs, **options)
        return out if self.adds else (out, None)

    def run(
        self,
        inputs: Mapping[str, Tensor | None],
        dy: Tensor | None,
        dsummed: Tensor | None = None,
        *,
        function: Any = None,
        **options: Any,
    ) -> Result:
        """Forward, and backward into fresh leaves of every tensor in ``inputs``."""
        leaves = {n: None if t is None else t.detach().requires_grad_() for n, t in inputs.items()}
        y, summed = self.call(leaves, function, **options)
        sent = [(o, g) for o, g in ((y, dy), (summed, dsummed)) if g is not None]
        torch.autograd.backward([o for o, _ in sent], [g for _, g in sent])
        grads = {n: t.grad for n, t in leaves.items() if t is not None}
        return Result(y.detach(), None if summed is None else summed.detach(), grads)

    def exact(
        self,
        inputs: Mapping[str, Tensor | None],
        dy: Tensor,
        dsummed: Tensor | None = None,
        *,
        eps: float,
        weight_offset: float = 0.0,
        **_: Any,
    ) -> Result:
        """The formula in numpy's widest float, as fp64 tensors (the sum rounded first).

        Written out here, and not taken from the reference, so that both are checked.
        """

        def wide(t: Tensor) -> np.ndarray:
            return t.detach().double().cpu().numpy().astype(np.longdouble)

        x = inputs["x"]
        assert x is not None
        s = wide(inputs["residual"] + x if self.adds else x)
        g = wide(dy)
        weight, bias = inputs.get("weight"), inputs.get("bias")
        scale = 1.0 if weight is None else wide(weight) + np.longdouble(weight_offset)
        if self.centers:
            s = s - s.mean(-1, keepdims=True)
        rstd = 1 / np.sqrt((s * s).mean(-1, keepdims=True) + np.longdouble(eps))
        x_hat = s * rstd
        y = x_hat * scale + (0.0 if bias is None else wide(bias))
        h = g * scale
        ds = h - x_hat * (h * x_hat).mean(-1, keepdims=True)
        if self.centers:
            ds = ds - h.mean(-1, keepdims=True)
        ds = ds * rstd + (0.0 if dsummed is None else wide(dsummed))
        leading = tuple(range(g.ndim - 1))
        by_name = {"x": ds, "residual": ds, "weight": (g * x_hat).sum(leading)}
        by_name["bias"] = g.sum(leading)

        def narrow(a: np.ndarray) -> Tensor:
            return torch.from_numpy(np.asarray(a, dtype=np.float64)).to(dy.device)

        summed = (inputs["residual"] + x).double() if self.adds else None
        grads = {n: narrow(by_name[n]) for n, t in inputs.items() if t is not None}
        return Result(narrow(y), summed, grads)

    def torch_function(self) -> Callable[..., Any]:
        """torch's own norm behind this operator's signature, the add written before it."""
        centers = self.centers

        def norm(s: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
            shape = (s.shape[-1],)
            if centers:
                return F.layer_norm(s, shape, weight, bias, eps)
            return F.rms_norm(s, shape, weight, eps)

        def plain(
            x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
        ) -> Tensor:
            return norm(x, weight, bias, eps)

        def add(
            x: Tensor,
            residual: Tensor,
            weight: Tensor | None = None,
            bias: Tensor | None = None,
            *,
            eps: float,
        ) -> tuple[Tensor, Tensor]:
            summed = residual + x
            return norm(summed, weight, bias, eps), summed

        return add if self.adds else plain


OPERATORS = {
    o.name: o
    for o in (
        Operator("rms_norm", adds=False, centers=False),
        Operator("layer_norm", adds=False, centers=True),
        Operator("add_rms_norm", adds=True, centers=False),
        Operator("add_layer_norm", adds=True, centers=True),
    )
}


@pytest.fixture(params=list(OPERATORS))
def op(request: pytest.FixtureRequest) -> Operator:
    """Each of the four operators; ``indirect=True`` with names picks some of them."""
    return OPERATORS[request.param]


def _ulp(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of ``dtype`` at each value of ``truth``."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(truth.double())
    return torch.ldexp(torch.full_like(truth, info.eps), exponent - 1).clamp_min(
        info.smallest_normal * info.eps
    )


@pytest.fixture(scope="session")
def ulp() -> Callable[[Tensor, torch.dtype], Tensor]:
    return _ulp


@pytest.fixture(scope="session")
def assert_close_to_truth() -> Callable[..., None]:
    """The accuracy rule: every error at most twice torch's largest, with a floor of one ulp.

    ``torchs_error``: the largest error torch made on other inputs of the same distribution.
    ``summed_over``: how many rows a weight gradient was summed over. Each term, of size 1, brings
    an error of about one unit: a random walk, whose end lies within 4 standard deviations.
    """

    def check(
        name: str,
        ours: Tensor,
        torchs: Tensor,
        truth: Tensor,
        torchs_error: float = 0.0,
        summed_over: int = 1,
    ) -> None:
        assert ours.shape == truth.shape, name
        error = (ours.double() - truth).abs()
        limit = 2 * max(torchs_error, (torchs.double() - truth).abs().max().item())
        if summed_over > 1:
            step = torch.finfo(torch.promote_types(ours.dtype, torch.float32)).eps
            limit = max(limit, 4 * step * summed_over**0.5)
        allowed = _ulp(truth, ours.dtype).clamp_min(limit)
        excess = error - allowed
        assert not torch.isnan(error).any(), f"{name}: NaN"
        if (excess > 0).any():
            worst = int(excess.argmax())
            raise AssertionError(
                f"{name}: {int((excess > 0).sum())} of {error.numel()} elements are off, the "
                f"worst {ours.flatten()[worst].item()} for {truth.flatten()[worst].item()} "
                f"(error {error.flatten()[worst].item():.3g}, "
                f"allowed {allowed.flatten()[worst].item():.3g})"
            )

    return check


@pytest.fixture(scope="session")
def assert_bits_equal() -> Callable[..., None]:
    """Same shape, dtype and bits; NaNs count as equal whatever their payload."""

    def check(ours: Tensor, expected: Tensor) -> None:
        assert ours.shape == expected.shape
        assert ours.dtype == expected.dtype
        nan = expected.isnan()
        assert torch.equal(ours.isnan(), nan)
        ours, expected = ours.masked_fill(nan, 0), expected.masked_fill(nan, 0)
        assert torch.equal(ours, expected)
        assert torch.equal(ours.signbit(), expected.signbit())

    return check


@pytest.fixture(scope="session")
def assert_same(path: str) -> Callable[[Result, Result], None]:
    """Equal bits from the kernels, up to the order in which rows are summed for weight gradients.

    torch's own operations, which the reference consists of, round as the memory layout has it.
    """
    exact = {"rtol": 0.0, "atol": 0.0} if path != "reference" else {"rtol": 1e-5, "atol": 1e-5}

    def check(ours: Result, expected: Result) -> None:
        torch.testing.assert_close(ours.y, expected.y, **exact)
        for name, grad in ours.grads.items():
            limits = exact
            if grad.dim() == 1:
                unit = torch.finfo(grad.dtype).eps
                limits = {"rtol": 2 * unit, "atol": max(unit, 64 * torch.finfo(torch.float32).eps)}
            torch.testing.assert_close(grad, expected.grads[name], **limits)

    return check
