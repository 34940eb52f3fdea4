# SPDX-License-Identifier: Apache-2.0
"""Inputs on which fused norms have gone wrong, with the right values beside them."""

import os
import time

import pytest
import torch
import torch.nn.functional as F

from fusedops import add_rms_norm, layer_norm, rms_norm

pytestmark = pytest.mark.usefixtures("tree_sums")

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def leaf(values, **kind):
    return torch.tensor(values, **kind).requires_grad_()


# Numbers -----------------------------------------------------------------------------------------


def test_sum_is_rounded_before_it_is_normalised(device):
    x = torch.tensor([1.0, 1, 1, 1], dtype=BF16, device=device)
    residual = torch.tensor([256.0, 0, 0, 0], dtype=BF16, device=device)
    y, summed = add_rms_norm(x, residual, None, 1e-6)
    assert summed.tolist() == [256, 1, 1, 1]  # 257 lies between two bf16 numbers
    assert y.tolist() == [2, 0.0078125, 0.0078125, 0.0078125]


@pytest.mark.usefixtures("kernels_run")
def test_sum_is_rounded_before_it_is_normalised_in_chunks(small_blocks, device):
    """The same for rows beyond one block, whose statistics are gathered chunk by chunk."""
    hidden_size = small_blocks + 2
    x = torch.ones(hidden_size, dtype=BF16, device=device)
    residual = torch.zeros_like(x)
    residual[0] = 256.0
    y, _ = add_rms_norm(x, residual, None, 1e-6, out_dtype=FP32)
    rstd = (65536 + hidden_size - 1) / hidden_size
    torch.testing.assert_close(y[1].item(), rstd**-0.5, rtol=1e-6, atol=0)


def test_sums_halfway_between_two_bf16_numbers_go_to_the_even_one(device):
    a = torch.randn(64, 256).to(device, BF16)
    b = torch.ldexp(a, torch.randint(-9, 0, a.shape, device=device)).to(BF16)
    _, summed = add_rms_norm(a, b)
    assert torch.equal(summed, b + a)
    halfway = (a.float() + b.float()).view(torch.int32) & 0xFFFF == 0x8000
    assert halfway.float().mean() > 0.01


def test_cast_orders_differ_in_a_quarter_of_bf16_elements(device):
    x = torch.randn(64, 256).to(device, BF16)
    weight = torch.randn(256).to(device, BF16)
    rounded_first = rms_norm(x, weight, cast="input")
    rounded_once = rms_norm(x, weight, cast="fp32")
    share = (rounded_first != rounded_once).double().mean().item()
    assert 0.15 < share < 0.35
    x_hat = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert (rounded_first != weight * x_hat.to(BF16)).double().mean() < 1e-3
    assert (rounded_once != (weight.float() * x_hat).to(BF16)).double().mean() < 1e-3


def test_fp32_weight_on_bf16_input_gives_fp32_with_cast_input(device):
    x = torch.randn(4, 64).to(device, BF16).requires_grad_()
    weight = torch.randn(64, device=device).requires_grad_()
    y = rms_norm(x, weight, cast="input")
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (FP32, BF16, FP32)
    assert rms_norm(x, weight, cast="fp32").dtype == BF16


@pytest.mark.parametrize("rows", [2048, 65536])
def test_weight_gradient_does_not_stall_in_bf16(rows, device):
    """A running sum in bf16 gets stuck at 256."""
    ones = torch.ones(rows, 4, dtype=BF16, device=device)
    weight = torch.ones(4, device=device).requires_grad_()
    for backwards in (1, 2):
        rms_norm(ones, weight, 1e-12).backward(ones)
        assert weight.grad.tolist() == [backwards * rows] * 4
    low = torch.ones(4, dtype=BF16, device=device).requires_grad_()
    rms_norm(ones, low, 1e-12).backward(ones)
    assert low.grad.tolist() == [rows] * 4


def test_variance_of_large_neighbouring_values(device):
    x = torch.tensor([[40000.0, 40001, 40002, 40003]], device=device)
    expected = torch.tensor([[-1.341635, -0.447212, 0.447212, 1.341635]], device=device)
    torch.testing.assert_close(layer_norm(x), expected, rtol=2e-6, atol=0)


def test_variance_of_tiny_values(device):
    x = torch.tensor([[-9.9e-4, -9.9e-4, 9.9e-4, 9.9e-4]], device=device)
    expected = 0.9999995 * x.sign()
    torch.testing.assert_close(layer_norm(x, eps=1e-12), expected, rtol=2e-7, atol=0)


def test_constant_row_gives_exactly_the_bias(device):
    bias = torch.randn(256, device=device)
    y = layer_norm(torch.full((1, 256), 1234.0, device=device), torch.ones_like(bias), bias)
    assert torch.equal(y[0], bias)


@pytest.mark.parametrize("hidden_size", [65537, 131072])
def test_variance_beyond_one_block(hidden_size, device):
    steps = torch.arange(hidden_size, device=device)
    y = layer_norm(40000.0 + (steps[None] % 4))
    spread = torch.tensor([-1.341635, -0.447212, 0.447212, 1.341635], device=device)
    torch.testing.assert_close(y[0], spread[steps % 4], rtol=2e-4, atol=0)
    tiny = 9.9e-4 * (1.0 - 2.0 * (steps[None] % 2))
    torch.testing.assert_close(layer_norm(tiny, eps=1e-12), tiny.sign(), rtol=2e-5, atol=0)
    bias = torch.randn(hidden_size, device=device)
    constant = torch.full((1, hidden_size), 1234.0, device=device)
    assert torch.equal(layer_norm(constant, None, bias)[0], bias)


def test_gemmas_offset_is_added_in_fp32(device):
    weight = torch.full((4,), 2.0**-9, dtype=BF16, device=device)  # 1 + w is 1.0 in bf16
    x = torch.ones(1, 4, device=device)
    y = rms_norm(x, weight, 1e-12, weight_offset=1.0)
    assert y.tolist() == [[1.001953125] * 4]
    y, _ = add_rms_norm(x, torch.zeros_like(x), weight, 1e-12, weight_offset=1.0)
    assert y.tolist() == [[1.001953125] * 4]


def test_gemmas_offset_is_the_same_in_both_passes(device):
    offset_weight = torch.full((32,), 2.0**-9, dtype=BF16, device=device).requires_grad_()
    whole_weight = (offset_weight.detach().float() + 1.0).requires_grad_()
    x = torch.randn(5, 32, device=device).requires_grad_()
    other_x = x.detach().clone().requires_grad_()
    dy = torch.randn(5, 32, device=device)
    y = rms_norm(x, offset_weight, weight_offset=1.0)
    other_y = rms_norm(other_x, whole_weight)
    y.backward(dy)
    other_y.backward(dy)
    assert torch.equal(y, other_y)
    assert torch.equal(x.grad, other_x.grad)
    assert torch.equal(offset_weight.grad, whole_weight.grad.to(BF16))


def test_eps_stands_inside_the_root(device):
    y = rms_norm(torch.full((1, 4), 1e-4, device=device), eps=1e-6)
    torch.testing.assert_close(y, torch.full_like(y, 0.0995037), rtol=1e-6, atol=0)


def test_fp16_squares_that_overflow(device):
    y = rms_norm(torch.full((1, 4096), 300.0, dtype=FP16, device=device))
    assert torch.equal(y, torch.ones_like(y))
    x = torch.ones(1, 4096, dtype=FP16, device=device)
    x[0, 0] = 1e4
    y = rms_norm(x)
    expected = torch.full_like(y, 0.00639987)
    expected[0, 0] = 63.9987
    assert torch.equal(y, expected)


def test_fp16_squares_that_underflow(device):
    y = rms_norm(torch.full((1, 256), 1e-4, dtype=FP16, device=device), eps=1e-12)
    assert torch.equal(y, torch.ones_like(y))


# Shapes and memory -------------------------------------------------------------------------------


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    x = torch.zeros(2**23 + 16, 256, dtype=BF16, device="cuda")
    x[-1] = 1.0
    weight = torch.ones(256, device="cuda").requires_grad_()
    y = rms_norm(x.requires_grad_(), weight, 1e-12)
    assert torch.equal(y[-1], torch.ones_like(y[-1]))
    assert not y[-17:-1].any()
    dy = torch.zeros_like(x)
    dy[-1, 0] = 1.0
    y.backward(dy)
    # ds = dy - x_hat / 256, dweight = dy * x_hat
    assert x.grad[-1, 0].item() == BF16_255_OF_256
    assert (x.grad[-1, 1:] == -1 / 256).all()
    assert weight.grad.tolist() == [1.0] + [0.0] * 255


BF16_255_OF_256 = torch.tensor(255 / 256).bfloat16().item()


def far_apart(rows):
    """``rows`` (5, H) spread over more than 2**31 elements of memory that is never touched.

    Each row stride alone fits into 32 bits; the offset of the last row does not.
    """
    hidden_size = rows.shape[-1]
    stride = 2**29 + 8
    buffer = torch.empty(4 * stride + hidden_size, dtype=rows.dtype, device=rows.device)
    return buffer.as_strided((5, hidden_size), (stride, 1)).copy_(rows)


@pytest.mark.usefixtures("wide_columns")
@pytest.mark.parametrize("far", ["x", "residual", "dy", "dsummed"])
@pytest.mark.parametrize("hidden_size", [40, 65537])
def test_row_offsets_beyond_two_to_the_31(op, hidden_size, far, device):
    if not op.adds and far in ("residual", "dsummed"):
        pytest.skip("no residual")
    inputs = op.inputs((5, hidden_size), FP16, device)
    grads = {"dy": torch.randn(5, hidden_size).to(device, FP16)}
    if op.adds:
        grads["dsummed"] = torch.randn(5, hidden_size).to(device, FP16)
    near = op.run(inputs, **grads)
    holder = inputs if far in inputs else grads
    holder[far] = far_apart(holder[far])
    apart = op.run(inputs, **grads)
    assert torch.equal(apart.y, near.y)
    for name, grad in apart.grads.items():
        assert torch.equal(grad, near.grads[name]), name


@pytest.mark.parametrize("shape", [(3, 0, 2520), (0, 64), (0, 65537)])
def test_zero_rows(op, shape, device):
    inputs = op.inputs(shape, FP32, device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    y, summed = op.call(leaves)
    assert y.shape == shape
    if op.adds:
        assert summed.shape == shape
    y.sum().backward()
    for name, tensor in leaves.items():
        assert torch.equal(tensor.grad, torch.zeros_like(tensor)), name
    # and the device still works
    assert rms_norm(torch.ones(1, 8, device=device), eps=1e-12).tolist() == [[1.0] * 8]


@pytest.mark.usefixtures("wide_columns")
@pytest.mark.parametrize(("hidden_size", "dtype"), [(65537, FP32), (131072, BF16)])
def test_rows_beyond_one_block(
    op, hidden_size, dtype, device, assert_close_to_truth, assert_bits_equal
):
    inputs = op.inputs((3, hidden_size), dtype, device)
    grads = [torch.randn(3, hidden_size).to(device, dtype) for _ in range(1 + op.adds)]
    ours = op.run(inputs, *grads, eps=1e-5)
    theirs = op.run(inputs, *grads, function=op.reference, eps=1e-5)
    truth = op.exact(inputs, *grads, eps=1e-5)
    assert_close_to_truth("y", ours.y, theirs.y, truth.y)
    if op.adds:
        assert_bits_equal(ours.summed, theirs.summed)
    for name, grad in ours.grads.items():
        assert_close_to_truth(name, grad, theirs.grads[name], truth.grads[name])


@pytest.mark.gpu
def test_longest_promised_row(op, assert_close_to_truth):
    inputs = op.inputs((2, 262144), BF16, "cuda")
    grads = [torch.randn(2, 262144).to("cuda", BF16) for _ in range(1 + op.adds)]
    ours = op.run(inputs, *grads, eps=1e-5)
    theirs = op.run(inputs, *grads, function=op.reference, eps=1e-5)
    truth = op.exact(inputs, *grads, eps=1e-5)
    assert_close_to_truth("y", ours.y, theirs.y, truth.y)
    for name, grad in ours.grads.items():
        assert_close_to_truth(name, grad, theirs.grads[name], truth.grads[name])


def test_expanded_gradient_of_a_plain_sum(op, device):
    """``y.sum().backward()`` sends a gradient with strides (0, 0)."""
    inputs = op.inputs((6, 40), FP32, device)
    ones = torch.ones(6, 40, device=device)
    expanded = torch.ones((), device=device).expand(6, 40)
    expected = op.run(inputs, ones)
    ours = op.run(inputs, expanded)
    for name, grad in ours.grads.items():
        assert torch.equal(grad, expected.grads[name]), name
    assert expanded.storage_offset() == 0 and expanded.stride() == (0, 0)
    assert expanded.untyped_storage().nbytes() == 4 and expanded[0, 0].item() == 1.0


@pytest.mark.parametrize("kind", ["sliced", "transposed"])
def test_strided_gradient_is_read_and_not_written(op, kind, device, assert_same):
    inputs = op.inputs((6, 40), FP32, device)
    if kind == "sliced":
        whole = torch.randn(6, 80, device=device)
        dy = whole[..., ::2]
    else:
        whole = torch.randn(40, 6, device=device)
        dy = whole.t()
    before = whole.clone()
    expected = op.run(inputs, dy.contiguous())
    assert_same(op.run(inputs, dy), expected)
    assert torch.equal(whole, before)


GUARD = 128  # elements on each side; a multiple of 16 bytes, so that alignment stays


@pytest.fixture
def guarded_buffers(monkeypatch, fresh_plans):
    """Everything that torch.empty makes lies between guard bands; the fixture checks them."""
    buffers = []
    empty = torch.empty

    def guarded(*shape, dtype=None, device=None, **options):
        if torch.device(device or "cpu").type == "meta":  # a plan's stand-in has no memory
            return empty(*shape, dtype=dtype, device=device, **options)
        shape = torch.Size(*shape) if isinstance(shape[0], tuple | list) else torch.Size(shape)
        buffer = torch.full((shape.numel() + 2 * GUARD,), 7.0, dtype=dtype, device=device)
        buffers.append(buffer)
        return buffer[GUARD:-GUARD].view(shape)

    def guarded_like(t, *, dtype=None):
        return guarded(t.shape, dtype=dtype or t.dtype, device=t.device)

    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(torch, "empty_like", guarded_like)
    yield buffers
    monkeypatch.setattr(torch, "empty", empty)
    assert buffers
    for buffer in buffers:
        assert (buffer[:GUARD] == 7.0).all()
        assert (buffer[-GUARD:] == 7.0).all()


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("hidden_size", [1, 3, 17, 100, 127, 1000])
def test_nothing_is_written_beside_the_results(op, hidden_size, guarded_buffers, device):
    """Masks of the last rows of a tile and of the last columns of a row."""
    inputs = op.inputs((5, hidden_size), FP32, device)
    op.run(inputs, *[torch.randn(5, hidden_size, device=device) for _ in range(1 + op.adds)])
    expected = {"y", "rstd", "dx", "dweight", "dweight_partial"}
    expected |= {"mean", "dbias", "dbias_partial"} if op.centers else set()
    expected |= {"summed"} if op.adds else set()
    assert len(guarded_buffers) == len(expected)


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("hidden_size", [65, 100, 130, 191])
def test_nothing_is_written_beside_long_rows(
    op, hidden_size, small_blocks, guarded_buffers, device
):
    assert hidden_size > small_blocks
    inputs = op.inputs((5, hidden_size), FP32, device)
    op.run(inputs, *[torch.randn(5, hidden_size, device=device) for _ in range(1 + op.adds)])


@pytest.fixture
def launched(monkeypatch, kernels_run, fresh_plans):
    """The kernel calls made so far; what is remembered is launched another way."""
    from fusedops.kernels import launch

    calls = []
    run = launch.run

    def keep(call, device):
        calls.append(call)
        run(call, device)

    monkeypatch.setattr(launch, "run", keep)
    return calls


def pointers(call):
    return {t.data_ptr() for t in call.arguments if isinstance(t, torch.Tensor)}


def test_head_slice_reaches_the_kernel_uncopied(op, launched, device):
    packed = torch.randn(2, 5, 3 * 64, device=device)
    heads = packed[..., 64:128].view(2, 5, 4, 16)
    op.call({**op.inputs((2, 5, 4, 16), FP32, device), "x": heads})
    (call,) = launched
    assert heads.data_ptr() in pointers(call)


def test_inference_makes_no_statistics(op, launched, device):
    inputs = op.inputs((4, 40), FP32, device)
    y, summed = op.call(inputs)
    (call,) = launched
    known = [*inputs.values(), y, *([] if summed is None else [summed])]
    assert pointers(call) == {t.data_ptr() for t in known}


def test_frozen_weights_get_no_partial_sums(op, launched, device):
    inputs = op.inputs((4, 40), FP32, device)
    inputs["x"].requires_grad_()
    y, _ = op.call(inputs)
    y.sum().backward()
    forward, backward = launched
    vectors = [t for t in backward.arguments if isinstance(t, torch.Tensor) and t.dim() == 1]
    given = {inputs["weight"].data_ptr(), *pointers(forward)}
    assert all(t.data_ptr() in given for t in vectors)
    wide = [t for t in backward.arguments if isinstance(t, torch.Tensor) and t.dim() == 2]
    assert len(wide) == 3, "the rows, dy and dx"


@pytest.mark.gpu
def test_head_slice_is_not_copied():
    packed = torch.randn(512, 64, 3 * 4096, dtype=BF16, device="cuda")
    heads = packed[..., :4096].view(512, 64, 32, 128)
    rms_norm(heads)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = rms_norm(heads)
    assert torch.cuda.max_memory_allocated() - before == y.numel() * y.element_size()


@pytest.mark.gpu
def test_many_short_rows_run_near_copy_bandwidth():
    """Head norms: hundreds of thousands of rows of 128 elements; one a program starves the GPU."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("a timing needs the GPU to itself: run without xdist")
    x = torch.randn(364800, 128, dtype=BF16, device="cuda")
    weight = torch.ones(128, dtype=BF16, device="cuda")
    target = torch.empty_like(x)

    def fastest(call):
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    assert fastest(lambda: rms_norm(x, weight)) < 1.6 * fastest(lambda: target.copy_(x))


@pytest.mark.gpu
@pytest.mark.parametrize("adds", [False, True])
def test_host_time_of_a_small_call_is_near_torchs(adds):
    """At (1, 4096) the GPU is done long before the CPU is: what counts is the launch."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("a timing needs the CPU to itself: run without xdist")
    x, residual = torch.randn(2, 1, 4096, dtype=BF16, device="cuda")
    weight = torch.ones(4096, dtype=BF16, device="cuda")

    def ours():
        return add_rms_norm(x, residual, weight) if adds else rms_norm(x, weight)

    def torchs():
        return F.rms_norm(residual + x if adds else x, (4096,), weight, 1e-6)

    def once(call):
        start = time.perf_counter()
        for _ in range(100):
            call()
        return time.perf_counter() - start

    times = {ours: [], torchs: []}
    for _ in range(30):
        for call, taken in times.items():
            torch.cuda.synchronize()
            taken.append(once(call))
    assert min(times[ours]) < 1.3 * min(times[torchs])


# Gradients and aliasing --------------------------------------------------------------------------


def test_gradient_passes_through_a_following_add(op, device):
    """In-place tricks on dy would corrupt what another consumer gets."""
    inputs = op.inputs((3, 32), FP32, device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    t = torch.randn(3, 32, device=device).requires_grad_()
    y, _ = op.call(leaves)
    out = y + t
    g = torch.randn(3, 32, device=device)
    before = g.clone()
    out.backward(g, retain_graph=True)
    first = {n: leaf.grad.clone() for n, leaf in leaves.items()}
    assert torch.equal(t.grad, before)
    out.backward(g, retain_graph=True)
    assert torch.equal(g, before)
    assert torch.equal(t.grad, 2 * before)
    for name, tensor in leaves.items():
        assert torch.equal(tensor.grad, 2 * first[name]), name


def test_one_tensor_as_branch_and_residual(device):
    x = leaf([[3.0, 4.0]], device=device)
    y, summed = add_rms_norm(x, x, None, 1e-12)
    pointers = {t.untyped_storage().data_ptr() for t in (x, y, summed)}
    assert len(pointers) == 3
    y.backward(torch.tensor([[1.0, 0.0]], device=device))
    expected = torch.tensor([[0.181019, -0.135765]], device=device)
    torch.testing.assert_close(x.grad, expected, rtol=5e-6, atol=0)
    assert x.tolist() == [[3.0, 4.0]] and summed.tolist() == [[6.0, 8.0]]


def test_gradients_of_y_and_of_the_sum_merge(device):
    x = leaf([[0.5, 1.0]], device=device)
    residual = leaf([[0.5, 1.0]], device=device)
    y, summed = add_rms_norm(x, residual, None, 1e-12)
    (y[0, 0] + summed.sum()).backward()
    expected = torch.tensor([[1.505964, 0.747018]], device=device)
    torch.testing.assert_close(x.grad, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(residual.grad, expected, rtol=1e-6, atol=0)


def gpu_only(*values):
    return pytest.param(*values, marks=pytest.mark.gpu)


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    ("rows", "hidden_size", "dtype"),
    [(2, 64, FP32), (37, 100, FP16), (70, 64, BF16), (5, 1025, FP32), (4, 40000, BF16)]
    + [gpu_only(r, h, d) for r in (7, 1000) for h in (128, 1000, 4096, 40000) for d in (FP32, BF16)]
    + [gpu_only(40000, h, BF16) for h in (128, 1000, 4096)],
)
def test_rows_do_not_depend_on_their_batch(op, rows, hidden_size, dtype, device):
    inputs = op.inputs((rows, hidden_size), dtype, device)
    grads = [torch.randn(rows, hidden_size).to(device, dtype) for _ in range(1 + op.adds)]

    def run(part):
        arguments = {n: t[part] if t.dim() > 1 else t for n, t in inputs.items()}
        x = arguments["x"].detach().requires_grad_()
        outputs = [t for t in op.call({**arguments, "x": x}) if t is not None]
        (dx,) = torch.autograd.grad(outputs, x, [g[part] for g in grads])
        return *outputs, dx

    batch = run(slice(None))
    for i in {0, rows // 3, rows - 1}:
        for alone, among_others in zip(run(slice(i, i + 1)), batch, strict=True):
            assert torch.equal(alone[0], among_others[i])


@pytest.mark.usefixtures("wide_columns")
@pytest.mark.parametrize(
    ("rows", "hidden_size", "dtype"),
    [(70, 100, FP32), (5, 40000, FP16)]
    + [gpu_only(20000, h, d) for h in (100, 1024, 4096) for d in (FP32, BF16)]
    + [gpu_only(500, 40000, BF16)],
)
def test_the_same_call_gives_the_same_bits(op, rows, hidden_size, dtype, device):
    inputs = op.inputs((rows, hidden_size), dtype, device)
    grads = [torch.randn(rows, hidden_size).to(device, dtype) for _ in range(1 + op.adds)]
    first = op.run(inputs, *grads)
    again = op.run(inputs, *grads)
    assert torch.equal(again.y, first.y)
    for name, grad in again.grads.items():
        assert torch.equal(grad, first.grads[name]), name


# Devices -----------------------------------------------------------------------------------------


@pytest.mark.gpu(2)
def test_tensors_on_a_device_that_is_not_current(op):
    torch.cuda.set_device(0)
    inputs = op.inputs((65, 1000), FP16, "cuda:0")
    grads = [torch.randn(65, 1000).to("cuda:0", FP16) for _ in range(1 + op.adds)]
    here = op.run(inputs, *grads)
    there_inputs = {n: t.to("cuda:1") for n, t in inputs.items()}
    there_grads = [g.to("cuda:1") for g in grads]
    allocated = torch.cuda.memory_stats(0)["allocation.all.allocated"]
    there = op.run(there_inputs, *there_grads)
    torch.cuda.synchronize(1)
    assert torch.cuda.memory_stats(0)["allocation.all.allocated"] == allocated
    assert torch.cuda.current_device() == 0
    assert torch.equal(there.y.cpu(), here.y.cpu())
    for name, grad in there.grads.items():
        assert grad.device == torch.device("cuda:1")
        assert torch.equal(grad.cpu(), here.grads[name].cpu()), name


@pytest.mark.gpu
def test_no_guard_is_entered_on_the_current_device(op, monkeypatch):
    inputs = op.inputs((4, 64), FP16, "cuda")
    op.run(inputs, torch.ones(4, 64, dtype=FP16, device="cuda"))

    def refuse(*_):
        raise AssertionError("torch.cuda.device entered")

    monkeypatch.setattr(torch.cuda, "device", refuse)
    op.run(inputs, torch.ones(4, 64, dtype=FP16, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_remembered_calls_give_the_same_bits(op, dtype, weight, monkeypatch, fresh_plans):
    """The second call of its kind launches the compiled kernel itself: other rows, same result."""
    from fusedops import direct
    from fusedops.kernels import launch

    if launch.TRITON_RELEASE not in direct.TESTED_TRITON:
        pytest.skip("this Triton is always launched the ordinary way")
    inputs = op.inputs((1000, 520), dtype, "cuda")
    if not weight:
        inputs = {n: t if t.dim() > 1 else None for n, t in inputs.items()}
    first = op.call(inputs)
    assert len(direct._plans) == 1

    def refuse(*_):
        raise AssertionError("launched the ordinary way")

    with monkeypatch.context() as patched:
        patched.setattr(launch, "run", refuse)
        for rows in (1000, 1, 2, 17, 999):
            part = {n: t[:rows] if t is not None and t.dim() > 1 else t for n, t in inputs.items()}
            for out, whole in zip(op.call(part), first, strict=True):
                assert (out is None) == (whole is None)
                assert out is None or torch.equal(out, whole[:rows])
    leading = {
        n: t.view(10, 100, 520) if t is not None and t.dim() > 1 else t for n, t in inputs.items()
    }
    op.call(leading)  # what is remembered is a call's rank, too
    monkeypatch.setattr(launch, "run", refuse)
    assert torch.equal(op.call(leading)[0], first[0].view(10, 100, 520))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("frozen", "autocast"),
    [(None, None), ("x", None), ("weight", None), (None, BF16), (None, FP16), ("weight", BF16)],
)
def test_remembered_training_calls_give_the_same_gradients(
    op, frozen, autocast, monkeypatch, fresh_plans
):
    """The second forward that needs a gradient is launched directly, and its backward."""
    from fusedops import direct, direct_backward
    from fusedops.kernels import launch

    if launch.TRITON_RELEASE not in direct.TESTED_TRITON:
        pytest.skip("this Triton is always launched the ordinary way")
    inputs = op.inputs((100, 520), BF16, "cuda")
    upstream = [torch.randn(100, 520, device="cuda", dtype=BF16) for _ in range(1 + op.adds)]

    def call(leaves):
        with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
            return [out for out in op.call(leaves) if out is not None]

    def backward(outputs, grads):
        grads = [g.to(out.dtype) for g, out in zip(grads, outputs, strict=True)]
        torch.autograd.backward(outputs, grads)

    results = []
    for attempt in range(3):
        leaves = {
            n: t if t is None else t.clone().requires_grad_(n != frozen) for n, t in inputs.items()
        }
        with monkeypatch.context() as patched:
            if attempt:
                patched.setattr(launch, "launch_forward", None)
                patched.setattr(launch, "launch_backward", None)
            outputs = call(leaves)
            backward(outputs, upstream)
        results.append([*outputs, *(t.grad for t in leaves.values() if t is not None)])
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
    assert list(map(type, direct_backward._plans.values())) == [direct_backward.Plan]
    for rows in (1, 2, 17, 5000):  # also where a single program makes the weight gradients
        more = op.inputs((rows, 520), BF16, "cuda")
        more = {n: t if t.dim() > 1 else inputs[n] for n, t in more.items()}
        grads = [torch.randn(rows, 520, device="cuda", dtype=BF16) for _ in range(1 + op.adds)]
        found = []
        for plans in (direct_backward._plans, {}):
            leaves = {n: t.clone().requires_grad_(n != frozen) for n, t in more.items()}
            with monkeypatch.context() as patched:
                patched.setattr(direct_backward, "_plans", plans)
                if plans:
                    patched.setattr(launch, "launch_backward", None)
                else:  # the forward's would know of the backward's
                    patched.setattr(direct, "_plans", {})
                backward(call(leaves), grads)
            found.append([t.grad for t in leaves.values()])
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


@pytest.mark.gpu
def test_calls_unlike_the_remembered_take_the_general_way(op, fresh_plans):
    """Whatever the compiled kernel was not specialised on must not be launched with it."""
    inputs = op.inputs((64, 520), FP16, "cuda")
    expected, _ = op.call(inputs)
    op.call(inputs)
    for name, tensor in inputs.items():
        misaligned = torch.empty(tensor.numel() + 1, dtype=FP16, device="cuda")[1:]
        misaligned = misaligned.view(tensor.shape).copy_(tensor)
        assert misaligned.data_ptr() % 16
        assert torch.equal(op.call({**inputs, name: misaligned})[0], expected), name
        strided = torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]
        assert torch.equal(op.call({**inputs, name: strided})[0], expected), name
        leaf = tensor.clone().requires_grad_()
        y, _ = op.call({**inputs, name: leaf})
        assert y.requires_grad
        assert torch.equal(y, expected), name
        with torch.no_grad():
            assert torch.equal(op.call({**inputs, name: leaf})[0], expected), name
    y, _ = op.call(inputs, eps=0.5)
    assert not torch.equal(y, expected)
    y, _ = op.call({n: t.float() for n, t in inputs.items()})
    assert y.dtype == FP32
    with torch.autocast("cuda", dtype=FP16):
        theirs, _ = op.call(inputs, op.torch_function(), eps=1e-5)
        assert op.call(inputs)[0].dtype == theirs.dtype


@pytest.mark.gpu
def test_a_capture_compiles_nothing(op):
    """Row counts are no part of what a kernel is compiled for: CUDA graphs may bring new ones."""
    warm = op.inputs((1, 1024), BF16, "cuda")
    op.call(warm)
    inputs = op.inputs((37, 1024), BF16, "cuda")
    expected = op.call(inputs)
    graph = torch.cuda.CUDAGraph()
    larger = op.inputs((41, 1024), BF16, "cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = op.call(larger)
    for name, tensor in inputs.items():
        larger[name][: len(tensor)].copy_(tensor)
    graph.replay()
    for out, right in zip(captured, expected, strict=True):
        assert right is None or torch.equal(out[:37], right)


@pytest.mark.gpu
def test_row_counts_share_one_compiled_kernel(op):
    from fusedops.kernels.forward import norm_forward_kernel

    def compiled():
        return sum(len(entry[0]) for entry in norm_forward_kernel.device_caches.values())

    inputs = op.inputs((64, 904), FP16, "cuda")
    leaves = {n: t.requires_grad_() for n, t in inputs.items()}
    before = compiled()
    for rows in range(1, 65):
        op.call({n: t[:rows] if t.dim() > 1 else t for n, t in leaves.items()})
    assert compiled() - before == 1
