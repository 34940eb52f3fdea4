# SPDX-License-Identifier: Apache-2.0
"""The direct path of the backward without a GPU: Triton's interpreter runs what would be launched.

That the compiled kernels are launched right is what the GPU tests of test_cases.py show.
"""

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops import autograd, direct, direct_backward, dispatch, reference
from fusedops.direct_backward import Wanted
from fusedops.functional import linked_add_norm

ROWS, H = 150, 48
FP16, FP32 = torch.float16, torch.float32

launch = pytest.importorskip("fusedops.kernels.launch")
pytestmark = [
    pytest.mark.usefixtures("interpreted", "tree_sums"),
    pytest.mark.skipif(not dispatch.INTERPRETED, reason="stands in for a GPU"),
]


class Warm(NamedTuple):
    """Stands for a compiled kernel."""

    kernel: Any
    dtypes: tuple[Any, ...]  # of the arguments that are pointers


VECTORS = {"weight_ptr", "bias_ptr", "dweight_ptr", "dbias_ptr"}
PARTIAL_SUMS = {"dweight_partial_ptr", "dbias_partial_ptr"}


def memory_at(pointer: int, dtype: torch.dtype, size: int) -> Tensor:
    """A tensor of that memory, of ``size`` elements; the interpreter writes all of it."""
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype)


class Interpreted:
    """Launches by pointers; the interpreter is handed tensors of the memory that they point to."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def empty(self, *arguments: Any) -> Tensor:
        """A new tensor as of `direct._empty`, full of NaN."""
        tensor: Tensor = torch.empty_strided(*arguments[:2], dtype=arguments[2])
        return tensor.fill_(torch.nan)

    def entry(self, compiled: Warm, tail: tuple[Any, ...]) -> direct.Entry:
        """As `direct._entry`."""
        kernel = compiled.kernel

        def call(x: int, y: int, z: int, stream: int, head: str, *arguments: Any) -> None:
            assert (z, stream, head) == (1, 7, "head")
            self.made.append(kernel.fn.__name__)
            given = dict(zip(kernel.arg_names, arguments, strict=True))
            for name, dtype in zip(kernel.arg_names, compiled.dtypes, strict=False):
                if isinstance(dtype, torch.dtype):
                    rows = given["n_partials"] if "n_partials" in given else given["n_rows"]
                    if name in VECTORS:
                        rows = 1
                    elif name in PARTIAL_SUMS and "n_rows" in given:
                        rows = x  # one for each program
                    columns = 1 if name in ("mean_ptr", "rstd_ptr") else H
                    given[name] = memory_at(given[name], dtype, rows * columns)
            kernel[x, y, z](*given.values())

        return call, ("head",), tail


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the C out of autograd's Functions."""
    forms = {"norm_function": "norm", "sum_function": "sum", "norm_of_sum": "norm_of_sum"}
    for function, form in forms.items():
        kind, forward = direct.asked[function], direct.asked[f"{form}_forward"]
        monkeypatch.setattr(kind, "forward", staticmethod(forward))
        monkeypatch.delattr(kind._backward_cls, "apply")


@pytest.fixture(params=["python", "c"])
def interpreted(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Interpreted]:
    """CPU tensors, which report device -1, are taken for those of a GPU; there are no plans."""
    stand_in = Interpreted()
    native = direct.load_native()
    if request.param == "c" and native is None:
        pytest.skip("direct.c cannot be compiled here")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(
        interpreter.InterpretedFunction, "warmup", lambda k, *a, **_: Warm(k, a), raising=False
    )
    monkeypatch.setattr(direct, "_entry", stand_in.entry)
    monkeypatch.setattr(direct, "_empty", stand_in.empty)
    monkeypatch.setattr(direct, "_current_device", torch.zeros(1).get_device)
    monkeypatch.setattr(direct, "_current_stream", lambda device: 7)
    monkeypatch.setattr(direct, "is_launched_as_tested", lambda: True)
    monkeypatch.setattr(direct_backward, "_plans", {})
    function = None if native is None or request.param == "python" else native.launch_backward
    monkeypatch.setattr(direct, "launch_backward", function)
    monkeypatch.setattr(direct, "_plans", {})
    monkeypatch.setattr(direct, "_kernels", {})
    if function is not None:
        replaced = ("current_device", "current_stream", "empty")
        native.configure(**direct.asked | {name: getattr(direct, f"_{name}") for name in replaced})
    else:
        monkeypatch.setattr(direct, "load_native", lambda: None)
        if native is not None:
            in_python(monkeypatch)
    yield stand_in
    if function is not None:
        native.configure(**direct.asked)


def saved(rows: int = ROWS, *, centered: bool = True, adds: bool = True) -> list[Any]:
    """dy, dsum, s, weight, mean, rstd, weight_offset."""
    s = torch.randn(rows, H).half()
    mean = s.float().mean(-1) if centered else torch.zeros(rows)
    rstd = ((s.float() - mean[:, None]).square().mean(-1) + 1e-5).rsqrt()
    dy, dsum = torch.randn(2, rows, H).half()
    return [
        dy, dsum if adds else None, s, torch.randn(H).half(), mean if centered else None, rstd, 0.5,
    ]  # fmt: skip


def split(arguments: list[Any]) -> tuple[Any, Any, Any]:
    """dy, dsum, and what autograd has saved."""
    return arguments[0], arguments[1], tuple(arguments[2:])


def plan_for(arguments: list[Any], wanted: Wanted) -> direct_backward.Plan:
    """As `remember`, which takes tensors of a GPU alone."""
    made = direct_backward._plan(*split(arguments), wanted)
    assert made is not None
    direct_backward._plans[direct_backward._key(*split(arguments), wanted)] = made
    return made


def general(arguments: list[Any], wanted: Wanted) -> Any:
    return autograd.kernel_backward(
        *arguments, True, needs_ds=wanted[0], dweight_dtype=wanted[1], dbias_dtype=wanted[2]
    )


@pytest.mark.parametrize("rows", [1, 64, 65, ROWS])
@pytest.mark.parametrize(
    ("centered", "adds", "wanted"),
    [
        (True, True, (True, FP16, FP32)),
        (True, False, (True, FP16, None)),
        (True, True, (True, None, FP16)),
        (False, True, (True, FP32, None)),
        (False, False, (False, FP16, None)),
        (False, True, (True, None, None)),
    ],
)
def test_the_same_bits_as_by_the_general_way(
    interpreted: Interpreted, rows: int, centered: bool, adds: bool, wanted: Wanted
) -> None:
    plan_for(saved(centered=centered, adds=adds), wanted)
    arguments = saved(rows, centered=centered, adds=adds)
    found = direct_backward.gradients(*split(arguments), wanted)
    assert found is not None
    expected = general(arguments, wanted)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))
    # Tiles have 64 rows; the interpreter has up to three programs.
    summed = rows > plan_for(arguments, wanted).block_rows and any(wanted[1:])
    assert interpreted.made[:2] == [
        "norm_backward_kernel", *["reduce_partials_kernel"] * summed
    ]  # fmt: skip


def test_without_a_weight_and_with_more_dimensions(interpreted: Interpreted) -> None:
    dy, dsum, s, _, mean, rstd, offset = saved()
    flat = [dy, dsum, s, None, mean, rstd, offset]
    plan_for(flat, (True, None, None))
    deep = [None if t is None else t.view(2, 75, H) for t in flat[:3]] + flat[3:]
    found = direct_backward.gradients(*split(deep), (True, None, None))
    assert found is not None and found[0] is not None
    assert found[0].shape == (2, 75, H)
    assert torch.equal(found[0].view(ROWS, H), general(flat, (True, None, None))[0])


def test_what_does_not_fit_is_not_launched(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = (True, FP16, FP32)
    arguments = saved()
    plan = plan_for(arguments, wanted)
    assert direct_backward.gradients(*split(arguments), wanted) is not None
    interpreted.made.clear()
    dy, dsum, s, weight, mean, rstd, offset = arguments
    storage = torch.randn(ROWS * H + 1).half()
    wide = torch.randn(ROWS, 2 * H).half()[:, :H]
    misaligned = storage[1:].view(ROWS, H)
    wrong = {
        "misaligned dy": [misaligned, dsum, s, weight, mean, rstd, offset],
        "misaligned sum": [dy, dsum, misaligned, weight, mean, rstd, offset],
        "misaligned weight": [dy, dsum, s, storage[1 : H + 1], mean, rstd, offset],
        "strided dy": [wide, dsum, s, weight, mean, rstd, offset],
        "expanded dy": [dy[:1].expand(ROWS, H), dsum, s, weight, mean, rstd, offset],
        "strided dsum": [dy, wide, s, weight, mean, rstd, offset],
        "strided sum": [dy, dsum, wide, weight, mean, rstd, offset],
        "strided weight": [dy, dsum, s, wide[0].repeat(2)[::2], mean, rstd, offset],
        "another dtype": [dy.float(), dsum, s, weight, mean, rstd, offset],
        "no dsum": [dy, None, s, weight, mean, rstd, offset],
        "no weight": [dy, dsum, s, None, mean, rstd, offset],
        "another norm": [dy, dsum, s, weight, None, rstd, offset],
        "statistics of another dtype": [dy, dsum, s, weight, mean, rstd.double(), offset],
        "a mean of another dtype": [dy, dsum, s, weight, mean.double(), rstd, offset],
        "strided statistics": [dy, dsum, s, weight, mean, rstd.repeat(2)[::2], offset],
        "a strided mean": [dy, dsum, s, weight, mean.repeat(2)[::2], rstd, offset],
        "another offset": [dy, dsum, s, weight, mean, rstd, 1.0],
        "no rows": [dy[:0], dsum[:0], s[:0], weight, mean[:0], rstd[:0], offset],
        "another shape": [dy[1:], dsum, s, weight, mean, rstd, offset],
        "another shape of dsum": [dy, dsum[1:], s, weight, mean, rstd, offset],
    }
    for reason, given in wrong.items():
        assert direct_backward.gradients(*split(given), wanted) is None, reason
    assert direct_backward.gradients(*split(arguments), (True, FP16, FP16)) is None
    for hook in (plan.hooks.launch_enter_hook, plan.hooks.launch_exit_hook):
        hook.calls.append(print)
        assert direct_backward.gradients(*split(arguments), wanted) is None
        hook.calls.clear()
    with monkeypatch.context() as patched:
        patched.setattr(direct, "_current_device", lambda: 1)
        if direct.launch_backward is not None:
            direct.load_native().configure(current_device=lambda: 1)
        assert direct_backward.gradients(*split(arguments), wanted) is None
    if direct.launch_backward is not None:
        direct.load_native().configure(current_device=direct._current_device)
    assert interpreted.made == []
    assert direct_backward.gradients(*split(arguments), wanted) is not None


def test_rows_beyond_one_program_have_no_plan(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = torch.zeros(2, 32768, dtype=FP16)
    arguments = [s, None, s, None, None, torch.ones(2), 0.0]
    assert direct_backward._plan(*split(arguments), (True, None, None)) is None  # type: ignore[arg-type]
    monkeypatch.setattr(direct, "is_launched_as_tested", lambda: False)
    assert direct_backward._plan(*split(saved()), (True, None, None)) is None


@pytest.fixture
def plannable(interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    """`remember` takes CPU tensors for those of a GPU."""
    monkeypatch.setattr(Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(direct, "_current_device", lambda: 0)
    if direct.launch_backward is not None:
        direct.load_native().configure(current_device=lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_the_second_backward_is_launched_directly(
    plannable: None, interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By autograd, with what its Function has saved."""
    x, residual, weight, bias = (torch.randn(ROWS, H), torch.randn(ROWS, H), *torch.randn(2, H))
    spec = autograd.Spec(True, False, 0.0, FP32, False)
    upstream = torch.randn(2, ROWS, H)
    results = []
    for attempt in range(3):
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight, bias)]
        y, summed = autograd.NormFunction.apply(*leaves, 1e-5, spec, None)
        s, saved_weight, mean, rstd = y.grad_fn.saved_tensors
        with monkeypatch.context() as patched:
            if attempt:
                patched.setattr(autograd, "kernel_backward", None)
            torch.autograd.backward([y, summed], list(upstream))
        results.append([leaf.grad for leaf in leaves])
    assert len(direct_backward._plans) == 1
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            assert torch.equal(a, b)
    assert interpreted.made == ["norm_backward_kernel", "reduce_partials_kernel"] * 2


def test_plans_are_bounded_and_made_once(plannable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MAX_KINDS", 4)
    arguments, wanted = saved(), (True, FP16, None)
    for number in range(9):
        arguments[-1] = number / 8
        direct_backward.remember(*split(arguments), wanted)
        assert len(direct_backward._plans) <= 4
    made = []
    original = direct_backward._plan
    monkeypatch.setattr(
        direct_backward, "_plan", lambda *given: (made.append(1), original(*given))[1]
    )
    arguments[-1] = 3.0
    start = threading.Barrier(4)

    def remember() -> None:
        start.wait()
        direct_backward.remember(*split(arguments), wanted)

    threads = [threading.Thread(target=remember) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_nothing_is_remembered_while_a_graph_is_captured(
    plannable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    direct_backward.remember(*split(saved()), (True, FP16, None))
    assert direct_backward._plans == {}


def test_errors_come_through_and_nothing_leaks(interpreted: Interpreted) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("no launch")

    wanted, arguments = (True, FP16, FP32), saved()
    plan = plan_for(arguments, wanted)
    tensors = [t for t in arguments if isinstance(t, Tensor)]
    watched = [*tensors, plan, plan.main_head, plan.main_tail, wanted, FP16]
    launch_backward = direct.launch_backward or direct_backward.launch_backward
    given = arguments[:-1]

    def calls() -> None:
        assert launch_backward(plan, wanted, *given) is not None
        assert launch_backward(plan, wanted, given[0].t(), *given[1:]) is None
        for broken in ("main_launch", "sum_launch"):
            with pytest.raises(RuntimeError, match="no launch"):
                launch_backward(plan._replace(**{broken: refuse}), wanted, *given)

    def counts() -> list[int]:
        return [sys.getrefcount(one) for one in watched]

    calls()
    before = counts()
    for _ in range(5):
        calls()
    assert counts() == before
    if direct.launch_backward is not None:
        for wrong in ((), (plan,), (1, 2, 3, 4, 5, 6, 7, 8), (plan, wanted, 1, 2, 3, 4, 5, 6)):
            with pytest.raises(TypeError):
                launch_backward(*wrong)


# --- autograd's Functions ----------------------------------------------------------------------

OPERATORS = {
    "layer_norm": lambda x, r, w, b: (fusedops.layer_norm(x, w, b),),
    "rms_norm": lambda x, r, w, b: (fusedops.rms_norm(x, w, weight_offset=1.0),),
    "add_layer_norm": lambda x, r, w, b: fusedops.add_layer_norm(x, r, w, b),
    "add_rms_norm": lambda x, r, w, b: fusedops.add_rms_norm(x, r, w, cast="input"),
    "linked layer_norm": lambda x, r, w, b: linked_add_norm(x, r, w, b, 1e-5, centered=True),
    "linked rms_norm": lambda x, r, w, b: linked_add_norm(x, r, w, None, 1e-6, centered=False),
}
NAMES = ("x", "residual", "weight", "bias")
BF16, FP64 = torch.bfloat16, torch.float64


class Training:
    """Calls of one operator and their backwards, alike but for what is known by then."""

    def __init__(
        self, name: str, interpreted: Interpreted, dtypes: tuple[torch.dtype, ...] = (FP32,) * 4
    ) -> None:
        self.call, self.interpreted = OPERATORS[name], interpreted
        self.adds, self.centered = not name.startswith(("layer", "rms")), "layer" in name
        shapes = (2, 35, H), (2, 35, H), (H,), (H,)
        self.values = [torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=True)]
        self.used = [True, self.adds, True, self.centered]
        self.upstream = [torch.randn(2, 35, H) for _ in range(3)]

    def leaves(self, frozen: tuple[str, ...] = ()) -> list[Tensor]:
        made = [
            value.clone().requires_grad_(used and name not in frozen)
            for value, used, name in zip(self.values, self.used, NAMES, strict=True)
        ]
        return made

    def grads(self, outputs: Any, given: Any = None) -> list[Tensor]:
        """Gradients to hand to ``outputs``, of their dtypes."""
        found = [g.to(out.dtype) for g, out in zip(self.upstream, outputs)]  # noqa: B905
        return found

    def step(
        self, frozen: tuple[str, ...] = (), autocast: torch.dtype | None = None
    ) -> list[Tensor | None]:
        leaves = self.leaves(frozen)
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            outputs = [out for out in self.call(*leaves) if out is not None]
        needy = [out for out in outputs if out.requires_grad]
        torch.autograd.backward(needy, self.grads(needy))
        return [*(out.detach() for out in outputs), *(leaf.grad for leaf in leaves)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def refuse_the_general_way(monkeypatch: pytest.MonkeyPatch, *, python: bool = False) -> None:
    """And with ``python`` what the C does in its place."""
    monkeypatch.setattr(autograd, "kernel_forward", None)
    monkeypatch.setattr(autograd, "kernel_backward", None)
    monkeypatch.setattr(reference, "norm_backward", None)
    if python:
        monkeypatch.setattr(autograd, "training_forward", None)
        monkeypatch.setattr(autograd, "gradients", None)
        monkeypatch.setattr(autograd, "apply_linked", None)


@pytest.mark.parametrize(
    ("frozen", "dtypes"),
    [
        ((), (BF16, FP32, FP32, FP32)),
        (("x",), (FP32, BF16, BF16, FP32)),
        (("residual", "bias"), (BF16, BF16, FP32, BF16)),
        (("x", "residual"), (FP16, FP16, FP16, FP32)),
        (("weight",), (FP32,) * 4),
        (("weight", "bias"), (FP16, FP32, FP16, FP16)),
    ],
)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_training_step_is_the_same_by_each_way(
    plannable: None,
    interpreted: Interpreted,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    frozen: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """The general way, the plan that it leaves, and in C the guard that this leaves."""
    training = Training(name, interpreted, dtypes)
    expected = training.step(frozen)
    for attempt in range(3):
        with monkeypatch.context() as patched:
            in_c = attempt == 2 and direct.launch_backward is not None
            refuse_the_general_way(patched, python=in_c)
            assert_same(training.step(frozen), expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_training_under_autocast_is_launched_directly(
    plannable: None, interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    training = Training(name, interpreted, (BF16,) * 4)
    kinds = (None, BF16, FP16)
    expected = [training.step(autocast=kind) for kind in kinds]
    for kind, result in zip(kinds, expected, strict=True):
        assert_same(training.step(autocast=kind), result)
    for kind, result in zip(kinds, expected, strict=True):
        with monkeypatch.context() as patched:
            refuse_the_general_way(patched, python=direct.launch_backward is not None)
            assert_same(training.step(autocast=kind), result)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_rms_norm", "linked layer_norm"])
def test_what_is_out_of_the_ordinary_is_left_to_python(
    plannable: None, interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One after the other, each with a `Fit` there: as in the first call, and none is spoiled."""
    training = Training(name, interpreted)

    def outputs() -> tuple[list[Tensor], list[Tensor]]:
        leaves = training.leaves()
        made = [out for out in training.call(*leaves) if out is not None]
        return [leaf for leaf in leaves if leaf.requires_grad], made

    def twice() -> list[Tensor | None]:
        """Second derivatives; those of the bias are none."""
        leaves, made = outputs()
        upstream = [g.clone().requires_grad_() for g in training.grads(made)]
        first = torch.autograd.grad(made, leaves, upstream, create_graph=True)
        total = sum(g.square().sum() for g in first)
        return list(torch.autograd.grad(total, [*leaves, *upstream], allow_unused=True))

    def batched() -> list[Tensor]:
        leaves, made = outputs()
        upstream = torch.stack([training.upstream[0]] * 2)
        return list(torch.autograd.grad(made[0], leaves, upstream, is_grads_batched=True))

    def retained() -> list[Tensor]:
        leaves, made = outputs()
        grads = training.grads(made)
        first = torch.autograd.grad(made, leaves, grads, retain_graph=True)
        assert_same(list(torch.autograd.grad(made, leaves, grads)), list(first))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(made, leaves, grads)
        return list(first)

    def without_y() -> list[Tensor | None]:
        leaves, made = outputs()
        last = made[-1:]
        return list(torch.autograd.grad(last, leaves, training.grads(last), allow_unused=True))

    def other_dtypes() -> list[Tensor]:
        unpacked = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach(), lambda t: (unpacked.append(t), t.double())[1]
        ):
            leaves, made = outputs()
        found = list(torch.autograd.grad(made, leaves, training.grads(made)))
        assert len(unpacked) == 3 + training.centered  # once each, as checkpoints insist on
        return found

    def negated() -> list[Tensor]:
        """Saved tensors of which the memory holds the opposite."""
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach(), lambda t: torch._neg_view(-t)
        ):
            leaves, made = outputs()
        found = list(torch.autograd.grad(made, leaves, training.grads(made)))
        plain_leaves, plain = outputs()
        expected = torch.autograd.grad(plain, plain_leaves, training.grads(plain))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        return found

    def watched() -> list[Tensor]:
        """By tensor hooks, that may replace a gradient, and by retain_grad."""
        leaves, made = outputs()
        made[0].register_hook(lambda g: g * 2)
        made[-1].register_hook(lambda g: (g * 3).t().contiguous().t() if g.dim() == 2 else g * 3)
        made[-1].retain_grad()
        grads = training.grads(made)
        torch.autograd.backward(made, grads)
        return [made[-1].grad, *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]

    def same_gradient() -> list[Tensor]:
        leaves, made = outputs()
        (g,) = training.grads(made[:1])
        return list(torch.autograd.grad(made, leaves, [g] * len(made)))

    def strided() -> list[Tensor]:
        leaves, made = outputs()
        return list(torch.autograd.grad([out.sum() for out in made], leaves))

    def checkpointed() -> list[Tensor]:
        found = []
        for reentrant in (False, True):
            leaves = training.leaves()

            def call(*given: Tensor) -> tuple[Tensor, ...]:
                # Without gradients, as a reentrant one runs first, a linked call has no third.
                return tuple(out for out in training.call(*given)[:2] if out is not None)

            made = checkpoint(call, *leaves, use_reentrant=reentrant)
            grads = training.grads(made)
            torch.autograd.backward(made, grads)
            found += [leaf.grad for leaf in leaves if leaf.requires_grad]
        return found  # type: ignore[return-value]

    def anomalous() -> list[Tensor | None]:
        with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
            return training.step()

    ways = (twice, batched, retained, without_y, other_dtypes, negated, watched, same_gradient,
            strided, checkpointed, anomalous)  # fmt: skip
    expected = []
    for way in ways:
        direct._plans.clear()
        direct_backward._plans.clear()
        expected.append(way())
    usual = [training.step() for _ in range(3)][-1]
    for way, result in zip(ways, expected, strict=True):
        assert_same(way(), result)
        with monkeypatch.context() as patched:
            refuse_the_general_way(patched, python=direct.launch_backward is not None)
            assert_same(training.step(), usual)


@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm", "linked layer_norm"])
@pytest.mark.parametrize("known", [False, True])
def test_saved_tensors_of_another_shape_are_refused(
    plannable: None, interpreted: Interpreted, name: str, known: bool
) -> None:
    """Given back by a hook; a kernel would read beyond their memory."""
    training = Training(name, interpreted)
    expected = [training.step() for _ in range(3)][-1] if known else None
    wrong: tuple[Any, ...] = (
        lambda t: t[:1],
        lambda t: t[..., :-1].contiguous(),
        lambda t: torch.cat([t, t]),
        lambda t: t.reshape(1, *t.shape),
    )
    for number in range(3 + training.centered):
        for change in wrong:
            changes = iter([change if place == number else Tensor.detach for place in range(4)])
            unpack = functools.partial(lambda changes, t: next(changes)(t), changes)
            leaves = training.leaves()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
                made = [out for out in training.call(*leaves) if out is not None]
            interpreted.made.clear()
            with pytest.raises(RuntimeError, match="saved for the backward: expected shape"):
                torch.autograd.backward(made, training.grads(made))
            assert interpreted.made == []
    if expected is not None:
        assert_same(training.step(), expected)


def test_nodes_are_called_as_before(plannable: None, interpreted: Interpreted) -> None:
    training = Training("linked layer_norm", interpreted)
    for _ in range(3):
        y, summed, after = training.call(*training.leaves())
        assert type(y.grad_fn).__name__ == type(after.grad_fn).__name__ == "NormOfSumBackward"
        assert type(summed.grad_fn).__name__ == "SumFunctionBackward"
        training.step()
    if direct.launch_backward is None:
        return
    for node in (y.grad_fn, summed.grad_fn):
        for wrong in ((), (None,) * 3):
            with pytest.raises(TypeError, match="expected the gradient"):
                node.apply(*wrong)
        with pytest.raises(TypeError):
            type(node).apply(None, training.upstream[0])
