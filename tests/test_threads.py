# SPDX-License-Identifier: Apache-2.0
"""Several threads and several CUDA streams: first calls, patched models, patching meanwhile."""

import sys
import threading

import pytest
import torch
from tiny_models import build_llama

from fusedops import direct, direct_backward, dispatch
from fusedops.integrations import patch, unpatch
from fusedops.integrations.patching import force_operators

pytestmark = pytest.mark.usefixtures("tree_sums")

FP16, FP32 = torch.float16, torch.float32

THREADS = 8


@pytest.fixture(autouse=True)
def hasty_switches():
    """Python changes threads wherever it can, not every few milliseconds only."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def at_once(function, threads=THREADS):
    """``function(i)`` for each thread i, begun together: the results, or the first error."""
    results, errors = [None] * threads, []
    start = threading.Barrier(threads)

    def run(i):
        start.wait()
        try:
            results[i] = function(i)
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return results


def assert_results(found, expected):
    assert torch.equal(found.y, expected.y)
    assert (found.summed is None) == (expected.summed is None)
    assert found.summed is None or torch.equal(found.summed, expected.summed)
    for name, grad in expected.grads.items():
        assert torch.equal(found.grads[name], grad), name


@pytest.mark.parametrize("dtype", [FP32, pytest.param(FP16, marks=pytest.mark.gpu)])
def test_eight_threads_on_a_first_call(op, dtype, device, fresh_plans):
    """Compiling, loading and launching, forward and backward, for a width that is met first."""
    width = 8 * (40 + len(op.name))  # of no other test
    given = [op.inputs((3 + i, width), dtype, device) for i in range(THREADS)]
    grads = [
        [torch.randn(3 + i, width).to(device, dtype) for _ in range(1 + op.adds)]
        for i in range(THREADS)
    ]
    calls = 2 if device == "cuda" else 1  # the second is launched directly there
    found = at_once(lambda i: [op.run(given[i], *grads[i]) for _ in range(calls)])
    for inputs, dys, results in zip(given, grads, found, strict=True):
        expected = op.run(inputs, *dys)
        for result in results:
            assert_results(result, expected)
    for plans in direct._plans.values():
        assert len(plans) == 1


def test_the_c_is_loaded_once(monkeypatch):
    for name in direct.EXPORTED:
        monkeypatch.setattr(direct, name, getattr(direct, name))
    direct.load_native.cache_clear()
    loaded = at_once(lambda _: direct.load_native())
    if None in loaded:
        pytest.skip("direct.c cannot be compiled here")
    assert len({id(module.Caller) for module in loaded}) == 1


@pytest.mark.gpu
def test_two_streams_through_one_operator(op):
    """From a thread each, and from one thread in turn; memory is reused between the calls."""
    given = [op.inputs((65 + 900 * i, 1032), FP16, "cuda") for i in range(2)]
    grads = [[torch.randn_like(t["x"]) for _ in range(1 + op.adds)] for t in given]
    expected = [op.run(t, *dys) for t, dys in zip(given, grads, strict=True)]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()

    def run(i):
        with torch.cuda.stream(streams[i]):
            return op.run(given[i], *grads[i])

    def check(i):
        for _ in range(100):
            found = run(i)
            streams[i].synchronize()
            assert_results(found, expected[i])

    at_once(check, threads=2)
    found = [run(i % 2) for i in range(100)]
    torch.cuda.synchronize()
    for i, result in enumerate(found):
        assert_results(result, expected[i % 2])


@pytest.mark.gpu
def test_calls_run_on_the_current_stream(op, monkeypatch):
    """Forward and backward, the first call and those after it: nothing waits for other streams."""
    inputs = op.inputs((65, 520), FP16, "cuda")
    grads = [torch.randn_like(inputs["x"]) for _ in range(1 + op.adds)]
    expected = op.run(inputs, *grads)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()

    def calls():
        monkeypatch.setattr(direct, "_plans", {})
        monkeypatch.setattr(direct_backward, "_plans", {})
        with torch.cuda.stream(side), torch.no_grad():
            outputs = [op.call(inputs)[0] for _ in range(3)]
        with torch.cuda.stream(side):
            return outputs, [op.run(inputs, *grads) for _ in range(3)]

    calls()  # for its memory: asking the driver for more would wait for everything
    torch.cuda.synchronize()
    torch.cuda._sleep(2**31)  # a second or so
    asleep = torch.cuda.Event()
    asleep.record()
    outputs, results = calls()
    side.synchronize()
    assert not asleep.query()
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected.y) for y in outputs)
    for result in results:
        assert_results(result, expected)


# Patched models ----------------------------------------------------------------------------------


def prompts(device):
    return [
        torch.randint(1, 60, (2, 5 + i), generator=torch.Generator().manual_seed(i)).to(device)
        for i in range(THREADS)
    ]


def logits(model, ids):
    with torch.no_grad():  # which threads do not share
        return model(ids).logits


def test_eight_threads_on_the_first_forwards_of_a_patched_model(device):
    model, given = build_llama().to(device), prompts(device)
    expected = [logits(model, ids) for ids in given]
    patch(model)
    with dispatch.count_calls() as calls:
        found = at_once(lambda i: [logits(model, given[i]) for _ in range(3)])
    for results, right in zip(found, expected, strict=True):
        for result in results:
            torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-4)
    if not dispatch.INTERPRETED and device == "cpu":
        assert not calls
        return
    assert sum(calls.values()) >= 3 * THREADS * 7
    assert sum(n for (name, _), n in calls.items() if name == "add_rms_norm") > 2 * THREADS * 6


def test_patching_while_other_threads_run(device):
    model, given = build_llama().to(device), prompts(device)
    expected = [logits(model, ids) for ids in given]
    before = [(type(module), set(vars(module))) for module in model.modules()]
    patch(model)
    unpatch(model)
    running = threading.Semaphore(0)

    def work(i):
        if i == 0:
            done = 0
            while not running.acquire(blocking=False) or (done := done + 1) < THREADS - 1:
                patch(model)
                unpatch(model)
            return
        try:
            for _ in range(6):
                torch.testing.assert_close(
                    logits(model, given[i]), expected[i], rtol=1e-4, atol=1e-4
                )
        finally:
            running.release()

    with force_operators():
        at_once(work)
    unpatch(model)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before
    assert all(map(torch.equal, [logits(model, ids) for ids in given], expected))
    patch(model)
    with dispatch.count_calls() as calls, force_operators():
        for _ in range(3):
            torch.testing.assert_close(logits(model, given[0]), expected[0], rtol=1e-4, atol=1e-4)
    assert sum(calls.values()) == 3 * 7
