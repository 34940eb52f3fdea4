# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: captured for row counts that were not met before, replayed with other inputs."""

from contextlib import nullcontext

import pytest
import torch
from tiny_models import build_llama

from fusedops import dispatch
from fusedops.integrations import patch, unpatch

pytestmark = pytest.mark.gpu

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def compiled():
    """Names of the kernels that Triton compiles meanwhile."""
    import triton

    names = []
    knobs = triton.knobs.runtime
    knobs.jit_post_compile_hook = lambda **details: names.append(details["fn"].name)
    yield names
    knobs.jit_post_compile_hook = None


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("width", [392, 65544])
def test_training_calls_with_new_row_counts(op, width, dtype, compiled):
    """Forward and backward after a warm-up with one row; the graphs share their memory."""
    outputs_of_call = 1 + op.adds
    warm = op.inputs((1, width), dtype, "cuda")
    op.run(warm, *[torch.ones_like(warm["x"])] * outputs_of_call)
    compiled.clear()
    inputs = op.inputs((1, width), dtype, "cuda")
    captured = []
    pool = torch.cuda.graph_pool_handle()
    for n in (37, 2, 300):
        given = {name: t.expand(n, -1).clone() if t.dim() > 1 else t for name, t in inputs.items()}
        leaves = {name: t.requires_grad_() for name, t in given.items()}
        grads = [torch.empty_like(given["x"]) for _ in range(outputs_of_call)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = [out for out in op.call(leaves) if out is not None]
            found = torch.autograd.grad(outputs, list(leaves.values()), grads)
        captured.append((graph, leaves, grads, outputs, found))
    assert compiled == []
    for graph, leaves, grads, outputs, found in captured * 2:
        with torch.no_grad():
            for tensor in (*leaves.values(), *grads):
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        expected = op.run(leaves, *grads)
        assert torch.equal(outputs[0], expected.y)
        assert not op.adds or torch.equal(outputs[1], expected.summed)
        for name, gradient in zip(leaves, found, strict=True):
            assert torch.equal(gradient, expected.grads[name]), name


def test_captures_on_a_stream_of_the_callers(op):
    """A capture by hand, on a side stream that no call has run on before."""
    inputs = op.inputs((33, 264), FP16, "cuda")
    expected = op.call(inputs)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        outputs = op.call(inputs)
        graph.capture_end()
    inputs["x"].neg_()
    if op.adds:
        inputs["residual"].neg_()
    for _ in range(2):
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            graph.replay()
        side.synchronize()
        for out, right in zip(outputs, op.call(inputs), strict=True):
            assert right is None or torch.equal(out, right)
    assert not torch.equal(outputs[0], expected[0])


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("width", [264, 65536])
def test_kernels_wait_for_what_came_before(op, width, captured):
    """They may be started early: after torch's kernels, copies, memsets, and other streams' work.

    The inputs are written just before the call by what takes long, and over just after it.
    """
    n = 2**24 // width
    given = op.inputs((n, width), BF16, "cuda")
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    news = [{name: torch.randn_like(t) for name, t in leaves.items()} for _ in range(4)]
    upstream = [torch.randn_like(given["x"]) for _ in range(1 + op.adds)]
    grads = [torch.empty_like(upstream[0]) for _ in upstream]
    expected = []
    for new in news:
        run = op.run({name: t.clone().requires_grad_() for name, t in new.items()}, *upstream)
        expected.append([run.y, *run.grads.values()])
    torch.cuda.synchronize()
    main, side = torch.cuda.Stream(), torch.cuda.Stream()

    def write(tensor, value, how):
        if how == 0:
            tensor.copy_(value)
        elif how == 1:
            tensor.zero_().add_(value)
        else:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                tensor.copy_(value)
            main.wait_stream(side)

    def steps():
        found = []
        for how, new in enumerate(news):
            with torch.no_grad():
                for name in leaves:
                    write(leaves[name], new[name], how % 3)
            outputs = [out for out in op.call(leaves) if out is not None]
            for gradient, value in zip(grads, upstream, strict=True):
                write(gradient, value, how % 3)
            found += [outputs[0], *torch.autograd.grad(outputs, list(leaves.values()), grads)]
            for gradient in grads:
                gradient.fill_(float("nan"))
            with torch.no_grad():
                for tensor in leaves.values():
                    tensor.fill_(float("nan"))
        return found

    with torch.cuda.stream(main):
        steps()  # compiles
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=main):
                found = steps()
        for _ in range(5):
            if captured:
                for tensor in found:
                    tensor.detach().fill_(float("nan"))
                graph.replay()
            else:
                found = steps()
            main.synchronize()
            for out, right in zip(found, [r for each in expected for r in each], strict=True):
                assert torch.equal(out, right)


def test_a_single_programs_backward_leaves_nothing_to_compile(op, compiled):
    """One row makes its weight gradient without the kernel that sums up partial ones."""
    width = 1048
    warm = op.inputs((1, width), FP32, "cuda")
    op.run(warm, *[torch.ones_like(warm["x"])] * (1 + op.adds))
    compiled.clear()
    more = op.inputs((1, width), FP32, "cuda")
    more = {name: t.expand(300, -1).clone() if t.dim() > 1 else t for name, t in more.items()}
    op.run(more, *[torch.ones_like(more["x"])] * (1 + op.adds))
    assert compiled == []


@pytest.mark.filterwarnings("ignore")  # of the compiler, in the static cache's decoding
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_generate_with_a_static_cache(compiles):
    """As transformers does it: eager, or the decoding compiled, with CUDA graphs of its own."""
    torch._dynamo.reset()
    model = build_llama().cuda()
    ids = torch.tensor([[5, 9, 33, 2, 17, 60, 8], [1, 44, 7, 12, 3, 3, 29]], device="cuda")

    def run():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            cache_implementation="static",
            disable_compile=not compiles,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences, torch.stack(out.logits)

    tokens, logits = run()
    patch(model)
    for counts in (nullcontext({}), dispatch.count_calls(), nullcontext({})):
        with counts as calls:
            found, found_logits = run()
        assert torch.equal(found, tokens)
        torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=1e-4)
        if calls:
            counted = dict(calls)
    assert counted["add_rms_norm", "triton"] >= 6  # the prompt's; all steps' where none is compiled
    torch._dynamo.reset()
    assert unpatch(model) == 7


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # eager beside captured
def test_a_patched_models_training_step(compiled):
    """Forward, loss and backward in a graph, for a number of tokens that is new to the kernels."""
    model = build_llama().to("cuda", BF16)
    parameters = list(model.parameters())

    def step(ids, mask):
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        return loss, torch.autograd.grad(loss, parameters)

    def inputs(batch, length):
        ids = torch.randint(1, 60, (batch, length), device="cuda")
        return ids, torch.ones(batch, 1, length, length, dtype=torch.bool, device="cuda").tril()

    ids, mask = inputs(3, 11)
    patch(model, fuse_residual="always")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # twice, so that it is known which norm follows which block
        for _ in range(3):
            step(*inputs(1, 2))
        step(ids, mask)  # torch's and cuBLAS's own preparations
    torch.cuda.current_stream().wait_stream(side)
    compiled.clear()
    ids, mask = inputs(3, 13)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradients = step(ids, mask)
    assert compiled == []
    for _ in range(3):
        ids.copy_(torch.randint_like(ids, 1, 60))
        graph.replay()
        expected, expected_gradients = step(ids, mask)
        assert torch.equal(loss, expected)
        torch.testing.assert_close(gradients, expected_gradients)
