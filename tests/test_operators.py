# SPDX-License-Identifier: Apache-2.0
"""Values, dtypes and layouts of the four operators, forward and backward."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import fusedops

pytestmark = pytest.mark.usefixtures("tree_sums")

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [FP16, BF16, FP32, FP64]

EPS = 1e-5

# Every dtype at the short lengths. The interpreter takes about a second for each long one, so
# there dtypes are spread over lengths, and a GPU adds the rest.
SIZES = [(h, dtype) for h in (1, 3, 64, 100, 128, 1000) for dtype in DTYPES]
SIZES += [(h, dtype) for h in (2, 17, 127) for dtype in (BF16, FP32)]
SIZES += [(1024, BF16), (1025, FP32), (4096, FP16), (4096, FP64), (5000, FP32), (5000, BF16)]
SIZES += [(16384, BF16)]
GPU_SIZES = [(h, dtype) for h in (2048, 8192, 11008, 32768, 40000) for dtype in DTYPES]
GPU_SIZES += [(16384, dtype) for dtype in (FP16, FP32, FP64)]
GPU_SIZES += [(h, dtype) for h in (65536, 262144) for dtype in (BF16, FP32, FP64)]
ALL_SIZES = SIZES + [pytest.param(*size, marks=pytest.mark.gpu) for size in GPU_SIZES]


def rows_for(hidden_size: int, device: str) -> int:
    """Odd counts, so that tiles of several rows are cut off at the end."""
    if device == "cpu":
        return 67 if hidden_size <= 3 else 35 if hidden_size <= 128 else 3
    return 1001 if hidden_size <= 1024 else 5 if hidden_size > 65536 else 131


def eps_for(hidden_size: int) -> float:
    """Rows of one to three elements may all be near zero; without a large eps one of them, with
    its large rstd, would decide alone."""
    return 0.1 if hidden_size <= 3 else EPS


def upstream(op, inputs, dtype=None):
    """Random gradients for y and, where there is one, the sum."""
    x = inputs["x"]
    s_dtype = torch.promote_types(x.dtype, inputs["residual"].dtype) if op.adds else x.dtype
    dy = torch.randn(x.shape).to(x.device, dtype or s_dtype)
    return (dy, torch.randn(x.shape).to(x.device, s_dtype)) if op.adds else (dy,)


def torchs_largest_errors(theirs, op, inputs, grads, eps, options):
    """The largest errors of ``theirs`` by name, over about 20000 elements.

    Of few elements the largest error is a matter of luck, so the columns of the rows are
    shuffled, against weight and bias, until there are enough.
    """
    shape = inputs["x"].shape
    largest = dict.fromkeys(("y", "x", "residual"), 0.0)
    for _ in range(20000 // (inputs["x"].numel() + 1)):
        order = torch.randperm(shape[-1], device=inputs["x"].device)
        rows = {n: t[..., order] if n in largest else t for n, t in inputs.items() if t is not None}
        shuffled = [g[..., order] for g in grads]
        torchs = op.run(rows, *shuffled, function=theirs, eps=eps)
        truth = op.exact(rows, *shuffled, eps=eps, **options)
        pairs = {"y": (torchs.y, truth.y)}
        pairs |= {n: (torchs.grads[n], truth.grads[n]) for n in rows if n in largest}
        for name, (a, b) in pairs.items():
            largest[name] = max(largest[name], (a.double() - b).abs().max().item())
    return largest


@pytest.fixture
def check_against(assert_close_to_truth, assert_bits_equal):
    def check(theirs, op, inputs, grads, *, eps=EPS, **options):
        """Run forward and backward; each error may be twice the largest that ``theirs`` makes."""
        ours = op.run(inputs, *grads, eps=eps, **options)
        torchs = op.run(inputs, *grads, function=theirs, eps=eps)
        truth = op.exact(inputs, *grads, eps=eps, **options)
        largest = torchs_largest_errors(theirs, op, inputs, grads, eps, options)
        assert_close_to_truth("y", ours.y, torchs.y, truth.y, largest["y"])
        if op.adds:
            assert_bits_equal(ours.summed, inputs["residual"] + inputs["x"])
        assert set(ours.grads) == set(truth.grads)
        for name, grad in ours.grads.items():
            assert grad.dtype == inputs[name].dtype, name
            assert_close_to_truth(
                f"d{name}",
                grad,
                torchs.grads[name],
                truth.grads[name],
                largest.get(name, 0.0),
                summed_over=inputs["x"][..., 0].numel() if name in ("weight", "bias") else 1,
            )
        return ours, torchs

    return check


@pytest.mark.parametrize(("hidden_size", "dtype"), ALL_SIZES, ids=str)
def test_forward_and_backward_as_accurate_as_torch(
    op, hidden_size, dtype, device, check_against, request
):
    if hidden_size > 1025:
        request.getfixturevalue("wide_columns")
    inputs = op.inputs((rows_for(hidden_size, device), hidden_size), dtype, device)
    grads = upstream(op, inputs)
    ours, torchs = check_against(op.torch_function(), op, inputs, grads, eps=eps_for(hidden_size))
    assert ours.y.dtype == dtype
    if dtype == FP16:
        torch.testing.assert_close(ours.y, torchs.y, atol=1e-4, rtol=torch.finfo(FP16).eps)
    if dtype == FP32:
        torch.testing.assert_close(ours.y, torchs.y, atol=1e-5, rtol=torch.finfo(FP32).eps)


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    ("hidden_size", "dtype"), [(65, FP32), (128, FP16), (130, BF16), (191, FP64), (300, FP32)]
)
def test_rows_in_chunks_as_accurate_as_torch(
    op, hidden_size, dtype, small_blocks, device, check_against
):
    """The kernels for rows beyond one block, at lengths around whole numbers of chunks."""
    assert hidden_size > small_blocks
    inputs = op.inputs((5, hidden_size), dtype, device)
    check_against(op.torch_function(), op, inputs, upstream(op, inputs))


@pytest.fixture
def shares_rows(fresh_plans, monkeypatch):
    """A function that makes all rows be shared, as very long ones are: (its name, configuration).

    The interpreter runs one program after another, so none could wait for another's message there.
    Each kernel is launched twice instead: messages do not depend on those received, and at the
    second launch all are there. What the first one wrote, the second overwrites.
    """
    from fusedops.kernels import launch

    if fusedops.dispatch.INTERPRETED and launch.TRITON_RELEASE == "3.9":
        pytest.skip("Triton 3.9's interpreter takes comparisons of scalars for integers, not masks")
    run = launch.run

    def run_twice(call, device):
        run(call, device)
        if call.meta.get("SLICE_COLS", call.meta.get("N_COLS")) != call.meta.get("N_COLS"):
            exchange = next(a for a in call.arguments if getattr(a, "dtype", None) == torch.int64)
            assert (exchange != -1).sum() == exchange.numel() - 15  # all programs came and sent
            exchange[0] = -1
            run(call, device)

    if fusedops.dispatch.INTERPRETED:
        monkeypatch.setattr(launch, "run", run_twice)
    return lambda name, config: monkeypatch.setattr(launch, name, lambda *_: config)


@pytest.fixture
def sliced(shares_rows):
    """Rows are shared by three programs."""
    from fusedops.kernels.config import LaunchConfig

    config = LaunchConfig(1, 64, num_warps=4, num_stages=3, programs_per_sm=2, slices=3)
    for name in ("forward_config", "backward_config"):
        shares_rows(name, config)


@pytest.fixture
def sliced_by_warps(shares_rows):
    """Three programs share a row in the backward, and each of their warps sends its own sums."""
    from fusedops.kernels.config import LaunchConfig, warps_apart

    config = LaunchConfig(1, 1024, 2, num_stages=3, programs_per_sm=2, slices=3, apart=True)
    assert warps_apart(config, 2) == warps_apart(config, 4) == 2
    shares_rows("backward_config", config)


@pytest.mark.usefixtures("kernels_run", "sliced_by_warps")
@pytest.mark.parametrize(("hidden_size", "dtype"), [(3072, BF16), (2200, FP32), (3000, FP16)])
def test_slices_whose_warps_send_as_accurate_as_torch(
    op, hidden_size, dtype, device, check_against
):
    """Also where some warps have none of the row's columns."""
    inputs = op.inputs((8, hidden_size), dtype, device)
    grads = upstream(op, inputs)
    check_against(op.torch_function(), op, inputs, grads)
    together = op.run(inputs, *grads).grads["x"]
    row = {name: t[5] if t.dim() > 1 else t for name, t in inputs.items()}
    assert torch.equal(op.run(row, *(g[5] for g in grads)).grads["x"], together[5])


@pytest.mark.usefixtures("kernels_run", "sliced")
@pytest.mark.parametrize(("hidden_size", "dtype"), [(192, BF16), (145, FP32), (120, FP16)])
def test_sliced_rows_as_accurate_as_torch(op, hidden_size, dtype, device, check_against):
    """Whole slices, a last one that is short, and slices that do not fill their blocks."""
    inputs = op.inputs((8, hidden_size), dtype, device)
    check_against(op.torch_function(), op, inputs, upstream(op, inputs))


@pytest.mark.usefixtures("kernels_run", "sliced")
def test_sliced_rows_at_two_strides(op, device, assert_same):
    """Rows of a head slice, misaligned, without weight: as contiguous ones, and as one by one."""
    inputs = {n: t for n, t in op.inputs((2, 3, 129), BF16, device).items() if t.dim() > 1}
    missing = dict.fromkeys(n for n in op.argument_names if n in ("weight", "bias"))
    grads = upstream(op, inputs)
    plain = op.run(inputs | missing, *grads)
    laid_out = {n: column_sliced(t) for n, t in inputs.items()}
    assert_same(op.run(laid_out | missing, *(column_sliced(g) for g in grads)), plain)
    alone = op.run({n: t[1, 1] for n, t in inputs.items()} | missing, *(g[1, 1] for g in grads))
    assert torch.equal(alone.y, plain.y[1, 1])
    assert torch.equal(alone.grads["x"], plain.grads["x"][1, 1])


@pytest.mark.usefixtures("kernels_run", "sliced")
def test_nan_in_one_sliced_row(op, device):
    """Also a NaN of all ones, the bits that mean that there is no message yet."""
    inputs = op.inputs((3, 130), FP32, device)
    expected, _ = op.call(inputs)
    inputs["x"][1, 70] = torch.tensor(-1, dtype=torch.int32).view(FP32)
    y, _ = op.call(inputs)
    assert y[1].isnan().all()
    assert torch.equal(y[::2], expected[::2])


@pytest.fixture
def one_row_a_program(fresh_plans, monkeypatch):
    """As on a GPU from some 1000 columns on, where LayerNorm's warps make statistics apart."""
    from fusedops.kernels import launch
    from fusedops.kernels.config import LaunchConfig, warps_apart

    config = LaunchConfig(1, 2048, num_warps=4, apart=True)
    assert warps_apart(config, 2) == warps_apart(config, 4) == 4
    monkeypatch.setattr(launch, "forward_config", lambda *_: config)


@pytest.mark.usefixtures("kernels_run", "one_row_a_program")
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64])
@pytest.mark.parametrize(
    "hidden_size", [2048, 1800, 1100, 130]
)  # warps share evenly, or not at all
def test_rows_of_several_warps_as_accurate_as_torch(op, hidden_size, dtype, device, check_against):
    inputs = op.inputs((3, hidden_size), dtype, device)
    inputs["x"][1] += 3.0
    check_against(op.torch_function(), op, inputs, upstream(op, inputs))


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("parts", ["whole", "small_blocks", "sliced", "one_row_a_program"])
def test_constant_rows_whose_squares_overflow(op, parts, device, request):
    """They centre to zero, also where a row's statistics are merged from those of its parts."""
    if not op.centers:
        pytest.skip("RMSNorm needs the squares themselves")
    if parts != "whole":
        request.getfixturevalue(parts)
    inputs = op.inputs((3, 145), FP32, device)
    inputs["x"][1] = 3e30
    if op.adds:
        inputs["residual"][1] = 0.0
    y, _ = op.call(inputs)
    assert torch.equal(y[1], inputs["bias"])


@pytest.mark.gpu
def test_sliced_rows_on_several_streams_at_once(op):
    """Programs that wait for each other, of launches that take each other's places on the GPU."""
    inputs = [op.inputs((rows, 65536), BF16, "cuda") for rows in (300, 40, 7)]
    grads = [upstream(op, given) for given in inputs]
    expected = [op.run(given, *dys) for given, dys in zip(inputs, grads, strict=True)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream, given, dys in zip(streams, inputs, grads, strict=True):
            with torch.cuda.stream(stream):
                found.append(op.run(given, *dys))
    torch.cuda.synchronize()
    for number, result in enumerate(found):
        right = expected[number % len(inputs)]
        assert torch.equal(result.y, right.y)
        assert all(torch.equal(result.grads[name], right.grads[name]) for name in right.grads)


@pytest.mark.gpu
def test_sliced_rows_in_a_captured_graph(op):
    """Each replay exchanges its messages anew."""
    inputs = op.inputs((33, 65536), BF16, "cuda")
    op.call(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.call(inputs)
    for _ in range(3):
        inputs["x"].copy_(torch.randn_like(inputs["x"]))
        graph.replay()
        for out, right in zip(captured, op.call(inputs), strict=True):
            assert right is None or torch.equal(out, right)


def test_the_widest_rows_of_one_program(monkeypatch):
    """RMSNorm's rows are not kept, so longer ones fit; aligned, and unless masks spill."""
    config = pytest.importorskip("fusedops.kernels.config")
    monkeypatch.setattr(config, "NVIDIA", True)
    choose, gpu = config.forward_config.__wrapped__, config.Gpu(132)
    for n_cols in (32768, 40000, 57344, 65536):
        chosen = choose(n_cols, 2, False, False, gpu)
        assert (chosen.block_size >= n_cols, chosen.slices, chosen.reloaded) == (True, 1, True)
    for n_cols in (57360, 65520, 65552):
        assert choose(n_cols, 2, False, False, gpu).slices > 1
    for n_cols, itemsize, centered, adds in (
        (65536, 4, False, False), (65536, 2, True, False), (65536, 2, False, True),
    ):  # fmt: skip
        assert choose(n_cols, itemsize, centered, adds, gpu).slices > 1
    unaligned = choose(40001, 2, False, False, gpu)
    assert unaligned.slices == 1
    assert unaligned.block_size < 40001


def test_rows_are_sliced_only_where_all_their_programs_fit(monkeypatch):
    """A row's programs wait for each other: on a GPU that cannot run them all, for ever."""
    config = pytest.importorskip("fusedops.kernels.config")
    monkeypatch.setattr(config, "NVIDIA", True)
    for choose in (config.forward_config.__wrapped__, config.backward_config.__wrapped__):
        for n_cols in (16384, 32768, 65536, 131072, 262144):
            for itemsize, centered, adds in ((2, True, False), (4, False, True)):
                for processors in (1, 7, 16, 64, 132):
                    chosen = choose(n_cols, itemsize, centered, adds, config.Gpu(processors))
                    assert chosen.slices <= processors
    assert config.backward_config.__wrapped__(65536, 2, False, False, config.Gpu(132)).slices == 32
    assert config.backward_config.__wrapped__(65536, 2, False, False, config.Gpu(16)).slices == 16
    assert config.backward_config.__wrapped__(65536, 2, False, False, config.Gpu(15)).slices == 1
    assert config.backward_config.__wrapped__(65537, 2, False, False, config.Gpu(132)).slices == 1
    assert config.backward_config.__wrapped__(65536, 8, False, False, config.Gpu(132)).slices == 1


@pytest.mark.parametrize("kilobytes", [64, 99, 163, 227])
def test_the_programs_that_the_backward_counts_on_fit_together(kilobytes, monkeypatch):
    """Those that do not would run after the others, with most of the multiprocessors idle."""
    config = pytest.importorskip("fusedops.kernels.config")
    monkeypatch.setattr(config, "NVIDIA", True)
    monkeypatch.setattr(config, "least_rows", lambda block_size: 1)
    gpu = config.Gpu(132, kilobytes * 1024)
    for n_cols in (*range(1, 16384, 61), 768, *(2**k for k in range(14))):
        for itemsize, centered, adds in itertools.product((2, 4, 8), (False, True), (False, True)):
            chosen = config.backward_config.__wrapped__(n_cols, itemsize, centered, adds, gpu)
            if chosen.slices > 1 or chosen.block_size < n_cols:
                continue
            assert chosen.block_rows >= 1
            row = (3 if adds else 2) * chosen.block_size * itemsize
            buffers = (chosen.num_stages - 1) * chosen.block_rows * row
            # A multiprocessor has a kilobyte more than a program may take, and reserves one a
            # program; the warps exchange their sums in some more.
            taken = chosen.programs_per_sm * (buffers + 512 + 1024)
            assert buffers == 0 or taken <= (kilobytes + 1) * 1024, (n_cols, itemsize, chosen)


def test_only_layer_norms_widest_blocks_are_walked_over_in_chunks(monkeypatch):
    config = pytest.importorskip("fusedops.kernels.config")
    launch = pytest.importorskip("fusedops.kernels.launch")
    monkeypatch.setattr(config, "NVIDIA", True)
    choose, h200 = config.forward_config.__wrapped__, config.Gpu(132, 227 * 1024)

    def chunks(n_cols, itemsize=2, centered=True, adds=False, gpu=h200):
        return launch.is_looped(choose(n_cols, itemsize, centered, adds, gpu), n_cols)

    assert chunks(16384)
    assert chunks(32768)
    assert not any(map(chunks, (8192, 12288, 14336, 16400, 20480, 24576, 65536)))
    assert not any(chunks(n, 4) for n in (8192, 12288, 16384))
    assert not chunks(16384, centered=False)
    assert not chunks(16384, adds=True)
    assert not chunks(32768, gpu=config.Gpu(132))  # of 1536 threads a multiprocessor
    monkeypatch.setattr(config, "NVIDIA", False)
    assert not chunks(16384)


@pytest.mark.parametrize("shape", [(3000,), (5, 11, 40), (3, 1, 5, 3, 48)], ids=str)
def test_any_rank(op, shape, device, check_against):
    inputs = op.inputs(shape, FP32, device)
    check_against(op.torch_function(), op, inputs, upstream(op, inputs))


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weight", [True, False])
def test_without_weight_or_bias(op, weight, bias, dtype, device, check_against):
    if bias and not op.centers:
        pytest.skip("RMSNorm has no bias")
    inputs = op.inputs((21, 200), dtype, device)
    if not weight:
        inputs["weight"] = None
    if not bias:
        inputs.pop("bias", None)
    check_against(op.torch_function(), op, inputs, upstream(op, inputs))


def test_calls_take_the_expected_path(op, path, device):
    inputs = op.inputs((2, 32), FP32, device)
    with fusedops.dispatch.count_calls() as calls:
        op.call(inputs)
        leaf = {**inputs, "x": inputs["x"].clone().requires_grad_()}
        op.call(leaf)[0].sum().backward()
    assert dict(calls) == {(op.name, path): 2}


def test_counters_inside_each_other_end_by_themselves(op, path, device):
    """They may have counted the same when the inner one ends."""
    inputs = op.inputs((2, 32), FP32, device)
    with fusedops.dispatch.count_calls() as outer:
        with fusedops.dispatch.count_calls() as inner:
            op.call(inputs)
        op.call(inputs)
    op.call(inputs)
    assert (outer[op.name, path], inner[op.name, path]) == (2, 1)


# Where the product with the weight is rounded ---------------------------------------------------


def llama(s, weight, eps):
    """transformers' LlamaRMSNorm: the normalised row is rounded before the product."""
    x_hat = s.float() * torch.rsqrt(s.float().pow(2).mean(-1, keepdim=True) + eps)
    return weight * x_hat.to(s.dtype)


def gpt_oss(s, weight, eps):
    """transformers' GptOssRMSNorm: the product in fp32, rounded once."""
    x_hat = s.float() * torch.rsqrt(s.float().pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * x_hat).to(s.dtype)


def gemma(s, weight, eps):
    """transformers' GemmaRMSNorm: the product with 1 + weight in fp32, rounded once."""
    x_hat = s.float() * torch.rsqrt(s.float().pow(2).mean(-1, keepdim=True) + eps)
    return (x_hat * (1.0 + weight.float())).type_as(s)


FAMILIES = {
    "llama": (llama, {"cast": "input"}),
    "gpt_oss": (gpt_oss, {"cast": "fp32"}),
    "gemma": (gemma, {"cast": "fp32", "weight_offset": 1.0}),
}


def hugging_face(formula, op):
    """A family's norm behind the operator's signature."""

    def plain(x, weight, eps):
        return formula(x, weight, eps)

    def add(x, residual, weight, eps):
        summed = residual + x
        return formula(summed, weight, eps), summed

    return add if op.adds else plain


RMS = pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"], indirect=True)
LAYER = pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm"], indirect=True)


@RMS
@pytest.mark.parametrize("weight_dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("family", FAMILIES)
def test_casts_as_accurate_as_the_family_they_stand_for(
    op, family, dtype, weight_dtype, device, check_against
):
    formula, options = FAMILIES[family]
    theirs = hugging_face(formula, op)
    inputs = op.inputs((31, 136), dtype, device, weight_dtype=weight_dtype)
    y_dtype = op.call(inputs, theirs, eps=EPS)[0].dtype
    ours, _ = check_against(theirs, op, inputs, upstream(op, inputs, y_dtype), **options)
    assert ours.y.dtype == y_dtype


def differing_share(ours, theirs):
    assert ours.dtype == theirs.dtype
    return (ours != theirs).double().mean().item()


@RMS
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_equal_the_familys_own_code(op, family, dtype, device):
    """All but the few elements that another last bit of rstd pushes over a rounding edge."""
    formula, options = FAMILIES[family]
    inputs = op.inputs((40, 768), dtype, device)
    theirs, _ = op.call(inputs, hugging_face(formula, op), eps=1e-6)
    y, _ = op.call(inputs, eps=1e-6, **options)
    assert differing_share(y, theirs) < 1e-3


@LAYER
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_bits_equal_torchs_layer_norm(op, dtype, device):
    inputs = op.inputs((40, 768), dtype, device)
    s = inputs["residual"] + inputs["x"] if op.adds else inputs["x"]
    theirs = F.layer_norm(s, (768,), inputs["weight"], inputs["bias"], 1e-5)
    y, _ = op.call(inputs, eps=1e-5)
    assert differing_share(y, theirs) < 1e-3


# The sum ---------------------------------------------------------------------------------------

ADDS = pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"], indirect=True)


# The interpreter computes with numpy, which warns where a GPU is silent.
NUMPY_WARNS = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"
)


@NUMPY_WARNS
@ADDS
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [(a, b) for a in DTYPES for b in DTYPES if FP64 not in (a, b)] + [(FP64, FP64)],
)
def test_summed_is_the_plain_sum_bit_for_bit(
    op, dtype, residual_dtype, train, device, assert_bits_equal
):
    inputs = op.inputs((4, 77), dtype, device, residual_dtype=residual_dtype)
    x, residual = inputs["x"], inputs["residual"]
    special = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 6e-8, 60000.0]
    for i, a in enumerate(special):
        for j, b in enumerate(special):
            x[0, 7 * i + j] = a
            residual[0, 7 * i + j] = b
    if train:
        x.requires_grad_()
    y, summed = op.call(inputs)
    expected = (residual + x).detach()
    assert_bits_equal(summed.detach(), expected)
    assert y.dtype == expected.dtype
    assert y[0].isnan().all()
    assert torch.isfinite(y[1:]).all()


@ADDS
@pytest.mark.parametrize(
    ("dtype", "residual_dtype"), [(BF16, FP32), (FP32, BF16), (FP16, BF16), (FP16, FP32)]
)
def test_mixed_branch_and_residual(op, dtype, residual_dtype, device, check_against):
    """The sum has the promoted dtype, and so has y; each gradient has its input's."""
    inputs = op.inputs((31, 120), dtype, device, residual_dtype=residual_dtype, weight_dtype=FP32)
    ours, _ = check_against(op.torch_function(), op, inputs, upstream(op, inputs))
    assert ours.y.dtype == ours.summed.dtype == FP32


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(FP32, BF16), (FP32, FP16), (BF16, FP32), (FP64, FP32), (FP16, FP64)]
)
def test_out_dtype(op, dtype, out_dtype, device, ulp):
    inputs = op.inputs((5, 120), dtype, device)
    dy = torch.randn(5, 120).to(device, out_dtype)
    grads = (dy, torch.zeros(5, 120).to(device, dtype)) if op.adds else (dy,)
    ours = op.run(inputs, *grads, eps=EPS, out_dtype=out_dtype)
    truth = op.exact(inputs, *grads, eps=EPS)
    assert ours.y.dtype == out_dtype
    unit = torch.finfo(FP32).eps if FP64 not in (dtype, out_dtype) else 0.0
    slack = 16 * max(unit, torch.finfo(FP32).eps if dtype != FP64 else torch.finfo(FP64).eps)
    assert ((ours.y.double() - truth.y).abs() <= ulp(truth.y, out_dtype) + slack).all()
    if op.adds:
        assert ours.summed.dtype == dtype
    for name, grad in ours.grads.items():
        assert grad.dtype == dtype
        error = (grad.double() - truth.grads[name]).abs()
        assert (error <= ulp(truth.grads[name], dtype) + 16 * slack).all(), name


@RMS
@pytest.mark.parametrize("cast", ["fp32", "input"])
def test_fp32_residual_stream_feeds_bf16_matrices(op, cast, device):
    """out_dtype wins over the promotion that ``cast="input"`` would give."""
    inputs = op.inputs((3, 64), FP32, device)
    y, _ = op.call(inputs, cast=cast, out_dtype=BF16)
    full, _ = op.call(inputs, cast=cast)
    assert torch.equal(y, full.to(BF16))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("autocast_dtype", [BF16, FP16])
def test_autocast_follows_torchs_own_norm(op, dtype, autocast_dtype, device):
    inputs = op.inputs((3, 64), dtype, device, weight_dtype=FP32)
    with torch.autocast(device, dtype=autocast_dtype):
        y, summed = op.call(inputs, eps=EPS)
        theirs, their_sum = op.call(inputs, op.torch_function(), eps=EPS)
    assert y.dtype == theirs.dtype
    assert differing_share(y, theirs) < (0.02 if y.dtype != FP32 else 1.0)
    torch.testing.assert_close(y, theirs)
    if op.adds:
        assert summed.dtype == their_sum.dtype
        assert torch.equal(summed, their_sum)


# Weight gradients over many rows -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rows", [150, pytest.param(50000, marks=pytest.mark.gpu)])
def test_weight_gradients_over_many_rows(op, rows, dtype, device):
    """Rounding errors of fp32 partial sums grow like a random walk: with the root of the rows."""
    inputs = op.inputs((rows, 48), dtype, device, weight_dtype=FP32)
    grads = upstream(op, inputs)
    ours = op.run(inputs, *grads, eps=EPS)
    truth = op.exact(inputs, *grads, eps=EPS)
    for name in ("weight", "bias") if op.centers else ("weight",):
        error = (ours.grads[name].double() - truth.grads[name]).abs().max().item()
        # each term, of size 1, brings an error of about one unit; 4 standard deviations
        assert error <= 4 * torch.finfo(FP32).eps * rows**0.5, name


# Layouts -----------------------------------------------------------------------------------------


def transposed(t):
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def column_sliced(t):
    return torch.stack([t, t + 1], -1).flatten(-2)[..., ::2]


def misaligned(t):
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return buffer[1:].view(t.shape).copy_(t)


def row_padded(t):
    return torch.cat([t, t], -1)[..., : t.shape[-1]]


def feature_major(t):
    return t.movedim(-1, 0).contiguous().movedim(0, -1)


LAYOUTS = [transposed, column_sliced, misaligned, row_padded, feature_major]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_layouts_equal_contiguous(op, layout, dtype, device, assert_same):
    inputs = op.inputs((4, 3, 48), dtype, device)
    grads = upstream(op, inputs)
    plain = op.run(inputs, *grads)
    laid_out = {n: layout(t) if t.dim() > 1 else t for n, t in inputs.items()}
    odd = op.run(laid_out, *(layout(g) for g in grads))
    assert_same(odd, plain)


@pytest.mark.parametrize("mixed", ["x", "residual", "dy", "dsummed"])
@ADDS
def test_one_strided_tensor_among_contiguous_ones(op, mixed, device, assert_same):
    inputs = op.inputs((4, 3, 48), FP32, device)
    dy, dsummed = upstream(op, inputs)
    plain = op.run(inputs, dy, dsummed)
    if mixed in inputs:
        inputs[mixed] = row_padded(transposed(inputs[mixed]))
    dy = column_sliced(dy) if mixed == "dy" else dy
    dsummed = transposed(dsummed) if mixed == "dsummed" else dsummed
    odd = op.run(inputs, dy, dsummed)
    assert_same(odd, plain)


def test_expanded_inputs(op, device, assert_same):
    inputs = op.inputs((4, 3, 48), FP32, device)
    inputs["x"] = inputs["x"][:1, :1].expand(4, 3, 48)
    weight = torch.full((1,), 1.5, device=device).expand(48)
    inputs["weight"] = weight
    grads = upstream(op, inputs)
    plain = op.run({n: t.contiguous() for n, t in inputs.items()}, *grads)
    odd = op.run(inputs, *grads)
    assert_same(odd, plain)


@pytest.mark.parametrize("name", ["weight", "bias"])
@LAYER
def test_strided_weight_and_bias(op, name, device, assert_same):
    inputs = op.inputs((4, 48), FP32, device)
    grads = upstream(op, inputs)
    plain = op.run(inputs, *grads)
    inputs[name] = column_sliced(inputs[name])
    assert not inputs[name].is_contiguous()
    odd = op.run(inputs, *grads)
    assert_same(odd, plain)


def test_head_slice_of_packed_projection(op, device, assert_same):
    """Query heads inside a packed projection: two row strides, the same values."""
    packed = torch.randn(2, 5, 192, device=device)
    heads = packed[..., :64].view(2, 5, 4, 16)
    other = op.inputs((2, 5, 4, 16), FP32, device)
    grads = upstream(op, {**other, "x": heads})
    plain = op.run({**other, "x": heads.contiguous()}, *grads)
    odd = op.run({**other, "x": heads}, *grads)
    assert_same(odd, plain)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "layout", [lambda t: t, *LAYOUTS], ids=["contiguous", *(f.__name__ for f in LAYOUTS)]
)
def test_results_have_the_strides_of_the_eager_code(op, layout, train, device):
    """Code after a norm calls ``.view``: what works after the original must work after ours.

    torch's LayerNorm returns row-major results; RMSNorms written in torch are elementwise
    functions of their input and lie as it does.
    """
    inputs = op.inputs((4, 3, 48), FP32, device)
    inputs = {n: layout(t) if t.dim() > 1 else t for n, t in inputs.items()}
    if train:
        inputs["x"].requires_grad_()
    y, summed = op.call(inputs, eps=EPS)
    eager = op.torch_function() if op.centers else hugging_face(llama, op)
    theirs, their_sum = op.call(inputs, eager, eps=EPS)
    assert y.stride() == theirs.stride()
    if op.adds:
        assert summed.stride() == their_sum.stride()


@pytest.mark.parametrize("norm", [fusedops.add_rms_norm, fusedops.add_layer_norm])
def test_sums_have_torchs_strides_also_in_dimensions_of_one(norm, device):
    x = torch.randn(48, 1, 2, device=device).transpose(0, 2)
    residual = torch.randn(2, 1, 48, device=device)
    _, summed = norm(x, residual)
    expected = residual + x
    assert expected.stride() != residual.stride()
    assert summed.stride() == expected.stride()
    assert torch.equal(summed, expected)


# Unusual values ----------------------------------------------------------------------------------


@NUMPY_WARNS
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_nan_and_infinity_stay_in_their_row(op, dtype, device):
    inputs = op.inputs((5, 64), dtype, device)
    clean, _ = op.call(inputs)
    inputs["x"][1, 3] = float("nan")
    inputs["x"][3, 5] = float("inf")
    y, _ = op.call(inputs)
    for row in (0, 2, 4):
        assert torch.equal(y[row], clean[row])
    theirs, _ = op.call(inputs, op.torch_function(), eps=EPS)
    assert torch.equal(y.isnan(), theirs.isnan())
    assert y[1].isnan().all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-15, 1e15, 3e17])
def test_magnitudes_within_the_squares_range(op, magnitude, device):
    inputs = op.inputs((3, 64), FP32, device)
    for name in {"x", "residual"} & set(inputs):
        inputs[name] = inputs[name] * magnitude
    y, _ = op.call(inputs, eps=EPS)
    theirs, _ = op.call(inputs, op.torch_function(), eps=EPS)
    torch.testing.assert_close(y, theirs, rtol=1e-5, atol=1e-6)


@NUMPY_WARNS
@pytest.mark.parametrize("magnitude", [1e20, 1e25, 1e35])
def test_squares_that_overflow_fp32(op, magnitude, device):
    """The variance is infinite, so what remains is the bias, as of the same formula in torch.

    LayerNorm may give NaN instead, as torch's own does from some size on; but no other number.
    """
    inputs = op.inputs((3, 64), FP32, device)
    for name in {"x", "residual"} & set(inputs):
        inputs[name] = inputs[name] * magnitude
    y, _ = op.call(inputs, eps=EPS)
    if op.centers:
        assert ((y == inputs["bias"]) | y.isnan()).all()
    else:
        assert not y.any()


def test_rows_of_zeros(op, device):
    inputs = op.inputs((3, 64), FP32, device)
    zeros = torch.zeros(3, 64, device=device)
    inputs["x"] = zeros
    if op.adds:
        inputs["residual"] = zeros
    grads = upstream(op, inputs)
    ours = op.run(inputs, *grads, eps=EPS)
    expected = inputs["bias"].expand(3, 64) if op.centers else zeros
    assert torch.equal(ours.y, expected)
    truth = op.exact(inputs, *grads, eps=EPS)
    torch.testing.assert_close(ours.grads["x"].double(), truth.grads["x"], rtol=1e-5, atol=1e-5)


def test_defaults_are_those_of_the_signature(device):
    x = torch.full((2, 8), 1e-3, device=device)
    assert torch.equal(fusedops.rms_norm(x), fusedops.rms_norm(x, None, 1e-6))
    y, _ = fusedops.add_rms_norm(x, x)
    assert torch.equal(y, fusedops.add_rms_norm(x, x, None, 1e-6)[0])
    row = torch.arange(8.0, device=device) * 1e-3
    assert torch.equal(fusedops.layer_norm(row), fusedops.layer_norm(row, None, None, 1e-5))
    y, _ = fusedops.add_layer_norm(row, row)
    assert torch.equal(y, fusedops.add_layer_norm(row, row, None, None, 1e-5)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_none_is_what_torch_takes(dtype, device):
    """Rows so small that eps decides; torch's documentation and its CPU kernel disagree here."""
    x = torch.full((2, 8), 1e-4, dtype=FP64).to(device, dtype)
    torch.testing.assert_close(
        fusedops.rms_norm(x, None, None), F.rms_norm(x, (8,)), rtol=1e-3, atol=0
    )
    y, _ = fusedops.add_rms_norm(x, x, None, None)
    torch.testing.assert_close(y, F.rms_norm(x + x, (8,)), rtol=1e-3, atol=0)
