# SPDX-License-Identifier: Apache-2.0
"""The direct path without a GPU: a recording function stands for the compiled kernel.

That the real kernels are launched right is what the GPU tests of test_cases.py show.
"""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fusedops import direct, direct_backward, dispatch
from fusedops.autograd import Spec, apply_directly, apply_linked
from fusedops.integrations import norms, patch, stream, unpatch

H = 24


class Chain:
    def __init__(self) -> None:
        self.calls: list[Any] = []


class Hooks:
    def __init__(self) -> None:
        self.launch_enter_hook, self.launch_exit_hook = Chain(), Chain()


class Launch:
    """Records the launches that are asked of it."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.made.append(arguments)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the direct path take CPU tensors, which report device -1."""
    monkeypatch.setattr(direct, "_current_device", torch.zeros(1).get_device)
    monkeypatch.setattr(direct, "_current_stream", abs)
    monkeypatch.setattr(direct, "_empty", torch._C._dynamo.guards._empty_strided_cpu)


@pytest.fixture(scope="module")
def native() -> Iterator[Any]:
    """direct.c, compiled."""
    pytest.importorskip("triton")
    try:
        module: Any = direct._build_native()
    except (subprocess.CalledProcessError, RuntimeError) as error:
        pytest.skip(f"no C compiler with Python's headers: {error}")
    yield module
    module.configure(**direct.asked)


Plans = tuple[direct.Plan, Any, Launch, Hooks]


@pytest.fixture(params=["python", "native"])
def make(request: pytest.FixtureRequest, native: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans calls like one with the given tensors: (plan, caller, launch, hooks)."""
    used = native if request.param == "native" else None
    monkeypatch.setattr(direct, "load_native", lambda: used)
    replaced = ("current_device", "current_stream", "empty")
    native.configure(**direct.asked | {name: getattr(direct, f"_{name}") for name in replaced})

    def plan(
        x: Tensor, residual: Any = None, weight: Any = None, bias: Any = None, train: Any = None
    ) -> Plans:
        rows = [t for t in (x, residual) if t is not None]
        vectors = [t for t in (weight, bias) if t is not None]
        guard = direct._guards.TensorGuards(
            *rows,
            *vectors,
            dynamic_dims_sizes=[*([None, H] for _ in rows), *([H] for _ in vectors)],
            dynamic_dims_strides=[*([None, None] for _ in rows), *([1] for _ in vectors)],
        )
        launch, hooks = Launch(), Hooks()
        made = direct.Plan(
            check=guard.check,
            grad=torch.is_grad_enabled(),
            train=train,
            autocast=direct._autocast_of(x),
            kernel=direct.Kernel(launch, ("head", 1), (2, "tail"), 4, None),
            has_weight=weight is not None,
            has_bias=bias is not None,
            n_cols=H,
            device=-1,
            y_dtype=torch.float16,
            sum_dtype=None if residual is None else torch.float64,
            statistics=None if train is None else torch.float32,
            hooks=hooks,
            eps=1e-5,
            spec=Spec(True, False, 0.0, torch.float16, True),
        )
        return made, made.caller(), launch, hooks

    return plan


def tensors(*, adds: bool = True, vectors: int = 2) -> list[Tensor | None]:
    x = torch.randn(9, H)
    return [
        x,
        torch.randn(9, H) if adds else None,
        torch.randn(H) if vectors else None,
        torch.randn(H) if vectors == 2 else None,
    ]


@pytest.mark.parametrize("vectors", [0, 1, 2])
@pytest.mark.parametrize("adds", [False, True])
def test_a_call_is_launched_on_its_pointers(make: Any, adds: bool, vectors: int) -> None:
    given = tensors(adds=adds, vectors=vectors)
    with torch.no_grad():
        _, call, launch, _ = make(*given)
        y, summed = call(*given)
    assert y.shape == (9, H)
    assert y.dtype == torch.float16
    assert (summed is None) is not adds
    assert summed is None or (summed.dtype, summed.shape) == (torch.float64, (9, H))
    pointers = [None if t is None else t.data_ptr() for t in (*given, y, summed)]
    assert launch.made == [(3, 1, 1, 1, "head", 1, *pointers, None, None, 9, 2, "tail")]


def test_a_training_call_goes_through_the_function(make: Any) -> None:
    given = tensors()
    leaves = [t.clone().requires_grad_() for t in given if t is not None]
    plan, call, launch, _ = make(*leaves, train=apply_directly)
    y, summed = call(*leaves)
    assert y.requires_grad
    assert summed.requires_grad
    assert y.grad_fn is summed.grad_fn
    (arguments,) = launch.made
    pointers = tuple(t.data_ptr() for t in (*leaves, y, summed))
    assert arguments[6:12] == pointers
    assert None not in arguments[12:14]  # the statistics
    with torch.no_grad():  # another grad mode
        assert call(*leaves) is None
    _, alone, launch, _ = make(leaves[0], None, leaves[2], train=apply_directly)
    y, summed = alone(leaves[0], None, leaves[2], None)
    assert y.requires_grad
    assert summed is None
    assert plan.train is apply_directly


def test_what_does_not_fit_is_not_launched(make: Any) -> None:
    x, residual, weight, bias = given = tensors()
    assert x is not None and residual is not None and weight is not None and bias is not None
    _, call, launch, hooks = make(*given)
    storage = torch.randn(9 * H + 1)
    wrong = {
        "misaligned": [storage[1:].view(9, H), residual, weight, bias],
        "strided": [torch.randn(9, 2 * H)[:, ::2], residual, weight, bias],
        "strided residual": [x, torch.randn(H, 9).t(), weight, bias],
        "another shape": [x, torch.randn(8, H), weight, bias],
        "no rows": [x[:0], residual[:0], weight, bias],
        "another width": [torch.randn(9, 8), torch.randn(9, 8), weight, bias],
        "another rank": [x[None], residual[None], weight, bias],
        "another dtype": [x.half(), residual, weight, bias],
        "weight of another dtype": [x, residual, weight.half(), bias],
        "no weight": [x, residual, None, bias],
        "no bias": [x, residual, weight, None],
        "no tensor": ["x", residual, weight, bias],
        "a gradient needed": [x.clone().requires_grad_(), residual, weight, bias],
        "a parameter": [x, residual, nn.Parameter(weight), bias],
        "negated": [torch._neg_view(x), residual, weight, bias],
        "no values": [torch._efficientzerotensor((9, H)), residual, weight, bias],
        "functional": [torch._to_functional_tensor(x), residual, weight, bias],
    }
    for reason, arguments in wrong.items():
        assert call(*arguments) is None, reason
    with torch.inference_mode():
        assert call(*given) is None
    with torch.autocast("cpu"):
        assert call(*given) is None
    with FlopCounterMode(display=False):
        assert call(*given) is None
    with dispatch.count_calls():
        assert call(*given) is None

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    with Watching():
        assert call(*given) is None
    with torch.device("cpu"), Watching(), torch.device("cpu"):
        assert call(*given) is None
    with torch.autograd.forward_ad.dual_level():
        assert call(*given) is None
    seen = []
    torch.func.vmap(lambda t: (seen.append(call(*given)), t)[1])(torch.randn(2))
    torch.func.grad(lambda t: (seen.append(call(*given)), t.sum())[1])(torch.randn(2))
    assert seen == [None, None]
    for chain in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        chain.calls.append(print)
        assert call(*given) is None
        chain.calls.clear()
    chains, hooks.launch_enter_hook = hooks.launch_enter_hook, print  # as Triton accepts, too
    assert call(*given) is None
    hooks.launch_enter_hook = chains
    assert launch.made == []
    assert call(*given) is not None
    with torch.device("cpu"):  # as torch.set_default_device does, for all that follows
        assert call(*given) is not None


@pytest.mark.parametrize("train", [None, apply_directly])
def test_a_plan_is_for_the_autocast_that_it_was_made_under(make: Any, train: Any) -> None:
    given = tensors()
    if train is not None:
        given = [None if t is None else t.requires_grad_() for t in given]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, call, launch, _ = make(*given, train=train)
        y, summed = call(*given)
        assert (y.dtype, summed.dtype) == (torch.float16, torch.float64)
    assert len(launch.made) == 1
    assert call(*given) is None
    with torch.autocast("cpu", dtype=torch.float16):
        assert call(*given) is None
        with torch.autocast("cpu", enabled=False):
            assert call(*given) is None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert call(*given) is not None
    assert len(launch.made) == 2


def test_errors_come_through_and_nothing_leaks(make: Any) -> None:
    given = tensors()
    plan, call, launch, _ = make(*given)
    launch.made = None  # recording fails
    with pytest.raises(AttributeError, match="append"):
        call(*given)
    launch.made = []
    with pytest.raises(TypeError):
        call(given[0])

    def alive() -> int:
        gc.collect()
        return sum(type(thing) is Tensor for thing in gc.get_objects())

    def counts() -> list[int]:
        held = [*given, plan, plan.y_dtype, plan.spec, direct._empty, None]
        return [sys.getrefcount(thing) for thing in held if thing is not None]

    before, objects = counts(), alive()
    for _ in range(500):
        call(*given)
        call(given[0][1:], *given[1:])  # type: ignore[index]
        launch.made.clear()
    # Other tests' garbage may go meanwhile; what leaks is there once a call.
    assert max(now - then for now, then in zip(counts(), before, strict=True)) < 100
    assert alive() - objects < 100


@pytest.fixture
def backward_plan(native: Any, monkeypatch: pytest.MonkeyPatch) -> direct_backward.Plan:
    """Serves every backward, with launches that are only recorded."""

    class Every(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return plan

    parts = (Launch(), ("head",), ("tail",), 4, 2)
    plan = direct_backward.Plan(*parts, *parts[:3], 1, 1, -1, Hooks(), ())
    monkeypatch.setattr(direct_backward, "_plans", Every())
    used = None if direct.load_native() is None else native.launch_backward
    monkeypatch.setattr(direct, "launch_backward", used)
    return plan


@pytest.mark.parametrize("train", [apply_directly, apply_linked])
def test_training_steps_leak_nothing_and_errors_come_through(
    make: Any, backward_plan: direct_backward.Plan, train: Any
) -> None:
    leaves = [t.requires_grad_() for t in tensors() if t is not None]
    plan, call, launch, _ = make(*leaves, train=train)
    backward = backward_plan.main_launch
    dy, dsum = torch.randn(9, H).half(), torch.randn(9, H).double()

    def step() -> None:
        outputs = call(*leaves)
        grads = torch.autograd.grad([outputs[0], outputs[-1]], leaves, [dy, dsum])
        assert [g.dtype for g in grads] == [torch.float32] * 4
        launch.made.clear()
        backward.made.clear()

    def fail() -> None:
        launch.made = None  # recording fails
        with pytest.raises(AttributeError, match="append"):
            call(*leaves)
        launch.made = []
        outputs = call(*leaves)
        backward.made = None
        with pytest.raises(AttributeError, match="append"):
            torch.autograd.grad([outputs[0], outputs[-1]], leaves, [dy, dsum])
        backward.made = []

    def counts() -> list[int]:
        gc.collect()
        held = [*leaves, dy, dsum, plan, plan.spec, plan.eps, backward_plan, call, plan.y_dtype]
        return [sys.getrefcount(thing) for thing in (*held, torch.float32, torch.float64, None)]

    def size() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    for _ in range(300):
        step()
        fail()
    before, pages = counts(), size()
    for _ in range(1000):
        step()
        fail()
    # Other tests' garbage may go meanwhile; what leaks is there once a call.
    assert max(now - then for now, then in zip(counts(), before, strict=True)) < 200
    assert size() - pages < 1000  # a page a call, of the six tensors that a call makes


@pytest.mark.parametrize("train", [apply_directly, apply_linked])
def test_threads_may_train_with_one_plan(
    make: Any, backward_plan: direct_backward.Plan, train: Any
) -> None:
    given, failures = tensors(), []
    _, call, *_ = make(*[t.clone().requires_grad_() for t in given if t is not None], train=train)
    start = threading.Barrier(4)

    def steps() -> None:
        leaves = [t.clone().requires_grad_() for t in given if t is not None]
        start.wait()
        try:
            for _ in range(100):
                y, *sums = call(*leaves)
                torch.autograd.backward([y, sums[-1]], [y.detach() * 0, torch.ones(9, H).double()])
                assert [leaf.grad.shape for leaf in leaves] == [leaf.shape for leaf in leaves]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=steps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_results_have_the_strides_of_new_tensors(make: Any) -> None:
    """The last token's row keeps the whole sequence's strides, and still counts as contiguous."""
    x, residual = torch.randn(1, 7, H)[:, 3], torch.randn(1, 7, H)[:, 4]
    assert x.is_contiguous()
    assert x.stride() == (7 * H, 1)
    with torch.no_grad():
        _, call, *_ = make(x, residual)
        assert [t.stride() for t in call(x, residual, None, None)] == [(H, 1), (H, 1)]
    x.requires_grad_()
    _, call, *_ = make(x, residual, train=apply_directly)
    assert [t.stride() for t in call(x, residual, None, None)] == [(H, 1), (H, 1)]
    for shape in ((3,), (1, 3), (2, 1, 3), (4, 2, 1, 5), (1, 1)):
        assert direct._contiguous(shape) == torch.empty(shape).stride()


@pytest.fixture
def plannable(monkeypatch: pytest.MonkeyPatch) -> None:
    """`direct.remember` takes CPU tensors for those of a GPU; there are no plans yet."""
    launch = pytest.importorskip("fusedops.kernels.launch")
    kernel = direct.Kernel(Launch(), (), (), 4, None)
    monkeypatch.setattr(Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(direct, "_current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(direct, "_kernel", lambda *_: kernel)
    monkeypatch.setattr(direct, "TESTED_TRITON", (launch.TRITON_RELEASE,))
    monkeypatch.setattr(direct, "_plans", {})


SPEC = Spec(True, False, 0.0, torch.float32, True)


def test_plans_keep_no_tensor_alive(plannable: None) -> None:
    given = tensors()
    held = [weakref.ref(t) for t in given if t is not None]
    direct.remember(("add_layer_norm",), *given, 1e-5, SPEC, None)  # type: ignore[arg-type]
    assert len(direct._plans) == 1
    del given
    assert [reference() for reference in held] == [None] * 4


def test_plans_for_ever_new_options_are_bounded(
    plannable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module whose eps is learned, say, must not fill the memory."""
    monkeypatch.setattr(direct, "MAX_KINDS", 10)
    monkeypatch.setattr(direct, "_kernels", dict.fromkeys(range(9)))
    given = tensors()
    for number in range(25):
        options = ("add_layer_norm", 1e-5 * number)
        direct.remember(options, *given, 1e-5, SPEC, None)  # type: ignore[arg-type]
        assert direct.find(options, *given) is not None  # type: ignore[arg-type]
        assert len(direct._plans) <= 10
    assert not direct._kernels


def test_threads_that_meet_make_one_plan(plannable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given, kernel = tensors(), direct._kernel
    start = threading.Barrier(8)
    monkeypatch.setattr(direct, "_kernel", lambda *args: (time.sleep(0.01), kernel(*args))[1])

    def remember() -> None:
        start.wait()
        direct.remember(("add_layer_norm",), *given, 1e-5, SPEC, None)  # type: ignore[arg-type]

    threads = [threading.Thread(target=remember) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(plans) for plans in direct._plans.values()] == [1]


def test_each_autocast_has_a_plan_of_its_own(plannable: None) -> None:
    given, options = tensors(), ("add_layer_norm",)
    found = []
    for times in range(2):
        for dtype in (None, torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                if times == 0:
                    assert direct.find(options, *given) is None  # type: ignore[arg-type]
                direct.remember(options, *given, 1e-5, SPEC, None)  # type: ignore[arg-type]
                found.append(direct.find(options, *given))  # type: ignore[arg-type]
    assert found[:3] == found[3:]
    assert len(set(found)) == 3
    assert None not in found
    assert [len(plans) for plans in direct._plans.values()] == [3]


@pytest.mark.skipif(not dispatch.INTERPRETED, reason="no kernels run here")
@pytest.mark.parametrize(
    "build", [nn.LayerNorm, lambda size: nn.RMSNorm(size, eps=1e-6), LlamaRMSNorm, GemmaRMSNorm]
)
def test_patched_norms_are_ready_under_autocast(
    plannable: None, tree_sums: None, build: Any
) -> None:
    norm, x = build(H), torch.randn(3, H)
    patch(norm)
    with torch.no_grad():
        for dtype in (None, torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                norm(x)
            made = vars(norm)[norms.READY]
            plans = next(reversed(direct._plans.values()))  # out_dtype makes another key
            assert made.call is plans[-1][1]
            assert plans[-1][0].autocast == (dtype and ("cpu", dtype))
    unpatch(norm)


def test_a_tensor_given_twice_leaves_no_plan(plannable: None) -> None:
    """No call would fit it, and the next call would make one more, until no good ones are left."""
    x, residual, weight, bias = tensors()
    twice = [(x, x, weight, bias), (x, residual, weight, weight)]
    for given in twice:
        direct.remember(("add_layer_norm",), *given, 1e-5, SPEC, None)  # type: ignore[arg-type]
        assert direct._plans == {}
    given = (x, residual, weight, bias)
    direct.remember(("add_layer_norm",), *given, 1e-5, SPEC, None)  # type: ignore[arg-type]
    assert direct.find(("add_layer_norm",), *given) is not None  # type: ignore[arg-type]


def ready(norm: nn.Module, call: Any) -> norms.Ready:
    """As left by calls that were launched by ``call``."""
    operands = norms.Operands(vars(norm)[norms.SPEC], None, None, norm.eps, None)
    made = norms.Ready(operands)
    made.call = made.add_call = call
    return made


def test_patched_norms_are_called_from_c(native: Any) -> None:
    """`call_module` and `ready_norm` decide as their Python twins do."""
    norm = nn.LayerNorm(H)
    patch(norm)
    x, calls = torch.randn(3, H), []

    def record(*arguments: Any) -> Any:
        calls.append(arguments)
        return "y", "summed"

    native.configure(**direct.asked)
    state = vars(norm)
    assert native.call_module(norm, type(norm), (x,), {}) is None
    state[norms.READY] = None
    assert native.call_module(norm, type(norm), (x,), {}) is None
    state[norms.READY] = ready(norm, record)
    python = (stream.call_unhooked, norms.ready_norm)

    def in_c(module: nn.Module, x: Tensor) -> Any:
        return native.call_module(module, type(norm), (x,), {})

    for call_module, ready_norm in ((in_c, native.ready_norm), python):
        calls.clear()
        assert call_module(norm, x) == "y"
        assert ready_norm(norm, x, None) == ("y", "summed")
        assert ready_norm(norm, x, x) == ("y", "summed")
        assert calls[0] == calls[1] == (x, None, norm.weight, norm.bias)
        assert calls[2] == (x, x, norm.weight, norm.bias)

        for register in (
            norm.register_forward_hook,
            norm.register_forward_pre_hook,
            norm.register_full_backward_hook,
            norm.register_full_backward_pre_hook,
        ):
            handle = register(lambda *_: None)
            assert call_module(norm, x) is None
            assert native.is_hooked(norm)
            handle.remove()
            assert not native.is_hooked(norm)
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        assert call_module(norm, x) is None
        handle.remove()
        state["forward"] = norm.forward
        assert call_module(norm, x) is None
        del state["forward"]
        assert call_module(norm, x) == "y"

        eps, norm.eps = norm.eps, 0.5
        assert call_module(norm, x) is ready_norm(norm, x, None) is None
        norm.eps = eps
        state[norms.READY].add_call = None
        assert ready_norm(norm, x, x) is None
        state[norms.READY].add_call = record
    stream._slot.held = object()  # something is handed over: for Python to look at
    assert in_c(norm, x) is None
    stream._slot.held = None
    with pytest.raises(TypeError):
        native.call_module(norm)
    with pytest.raises(AttributeError):
        native.call_module(object(), object, (x,), {})
    assert native.call_module(norm, nn.LayerNorm, (x,), {}) is None  # somebody's class on top
    assert native.call_module(norm, type(norm), (x, x), {}) is None
    assert native.call_module(norm, type(norm), (x,), {"gate": x}) is None
    assert native.call_module(norm, type(norm), ("x",), {}) is None
    del state[norms.READY]
    unpatch(norm)


def test_half_made_objects_are_none_of_ours(native: Any) -> None:
    """Others may write into a module's dictionary; what is read by place is looked at first."""
    norm, x = nn.LayerNorm(H), torch.randn(3, H)
    patch(norm)
    native.configure(**direct.asked)
    state, found = vars(norm), lambda *_: ("y", None)
    whole = ready(norm, found)
    assert native.ready_norm(norm, x, None) is None
    for missing in (None, "call", "eps_name", "eps", "weight", "bias"):
        made = norms.Ready.__new__(norms.Ready)
        for name in norms.Ready.__slots__ if missing else ():
            if name != missing:
                setattr(made, name, getattr(whole, name))
        state[norms.READY] = made
        assert native.ready_norm(norm, x, None) is None, missing
    for other in (1, object(), "ready", x, {}):
        state[norms.READY] = other
        assert native.ready_norm(norm, x, None) is None
    state[norms.READY] = whole
    assert native.ready_norm(norm, x, None) == ("y", None)

    held = stream._HandOver(x, x, None, norm, stream.BlockState(nn.Module))
    spec = state[norms.SPEC]
    duck = type("Duck", (), {name: getattr(spec, name) for name in ("eps", "weight", "bias")})()
    for wrong in (duck, type(spec).__new__(type(spec))):
        held.spec = state[norms.SPEC] = wrong
        stream._slot.held = held
        assert native.call_module(norm, type(norm), (x,), {}) is None
    held.spec = state[norms.SPEC] = spec
    assert native.call_module(norm, type(norm), (x,), {}) is x
    stream._slot.held = None
    unpatch(norm)


def test_integrations_may_come_after_the_first_launch(native: Any) -> None:
    """The C is loaded by a plain call then, and learns what it needs for norms later."""
    program = """
import torch
from fusedops import direct

assert direct.load_native() is not None
from fusedops.integrations import stream

norm = torch.nn.LayerNorm(8)
assert not direct.is_hooked(norm)
norm.register_forward_hook(print)
assert direct.is_hooked(norm)
"""
    root, environment = Path(__file__).parents[1], os.environ | {"FUSEDOPS_NATIVE": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, env=environment)


def test_tensors_are_found_where_torch_has_them(
    native: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else direct.c would read memory that is something else: it is not used then."""
    for wrong in (torch.empty(3, 3), torch.empty(3, 2).t(), torch.empty(6)):
        with pytest.raises(RuntimeError, match="not as direct.c knows them"):
            native.configure(tensor_type=Tensor, example=wrong)
    with pytest.raises(AttributeError):
        native.configure(tensor_type=Tensor, example=object())
    native.configure(**direct.asked)
    monkeypatch.setitem(direct.asked, "example", torch.empty(3, 3))
    monkeypatch.setattr(dispatch, "_logged", set())
    direct.load_native.cache_clear()
    try:
        with caplog.at_level("INFO", logger="fusedops"):
            assert direct.load_native() is None
        assert "not as direct.c knows them" in caplog.text
    finally:
        direct.load_native.cache_clear()


def test_without_a_compiler_python_launches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build = pytest.importorskip("triton.runtime.build")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(build, "compile_module_from_src", fail)
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(direct, "call_module", None)
    direct.load_native.cache_clear()
    try:
        with caplog.at_level("INFO", logger="fusedops"):
            assert direct.load_native() is None
        assert "direct.c cannot be used (no compiler here)" in caplog.text
        assert direct.call_module is None
    finally:
        direct.load_native.cache_clear()
