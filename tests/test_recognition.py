# SPDX-License-Identifier: Apache-2.0
"""What `recognise` takes for a norm, and what it must not be fooled by."""

import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.t5.modeling_t5 import T5LayerNorm

import fusedops
from fusedops.integrations.recognition import (
    UnrecognisedNorm,
    is_candidate,
    recognise,
    recognition_key,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ALL_PAIRS = {(x, w) for x in (FP32, BF16, FP16) for w in (FP32, BF16, FP16)}
SAME_PAIRS = {(t, t) for t in (FP32, BF16, FP16, FP64)}


@pytest.mark.parametrize(
    ("module", "described", "dtypes", "layout"),
    [
        (nn.LayerNorm(40), "layer_norm", SAME_PAIRS, "contiguous"),
        (nn.LayerNorm(40, bias=False), "layer_norm", SAME_PAIRS, "contiguous"),
        (nn.RMSNorm(40), "rms_norm, cast=fp32", SAME_PAIRS, "unknown"),
        (nn.RMSNorm(40, eps=1e-5), "rms_norm, cast=fp32", SAME_PAIRS, "unknown"),
        (LlamaRMSNorm(40), "rms_norm, cast=input", ALL_PAIRS, "preserve"),
        (GptOssRMSNorm(40), "rms_norm, cast=fp32", ALL_PAIRS, "preserve"),
        (GemmaRMSNorm(40), "rms_norm, cast=fp32, weight_offset=1", ALL_PAIRS, "preserve"),
        (Gemma4RMSNorm(40), "rms_norm, cast=fp32", ALL_PAIRS, "preserve"),
        (CohereLayerNorm(40), "layer_norm", ALL_PAIRS, "preserve"),
    ],
)
def test_spec(module: nn.Module, described: str, dtypes: set, layout: str) -> None:
    spec = recognise(module)
    assert spec.describe() == described
    assert spec.dtypes == dtypes
    assert spec.layout == layout
    assert spec.size == 40
    assert spec.ranks == {1, 2, 3, 4, 5}
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_t5_rounds_to_the_weights_dtype_so_mixed_pairs_are_not_proven() -> None:
    assert recognise(T5LayerNorm(40)).dtypes == {(FP32, FP32), (BF16, BF16), (FP16, FP16)}


def test_norms_without_weight_take_any_size_that_they_take_themselves() -> None:
    spec = recognise(Gemma4RMSNorm(40, with_scale=False))
    assert spec.describe() == "rms_norm, no weight"
    assert spec.size is None
    assert spec.dtypes == {(FP32, None), (BF16, None), (FP16, None)}  # fp64 it computes in fp32
    assert recognise(nn.LayerNorm(40, elementwise_affine=False)).size == 40


def test_autocast_rule_is_torchs_own_for_torchs_classes_only() -> None:
    class Wrapped(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).to(x.dtype)

    assert recognise(nn.LayerNorm(8)).autocast == "torch"
    assert recognise(nn.RMSNorm(8)).autocast == "torch"
    assert recognise(LlamaRMSNorm(8)).autocast == "none"
    assert recognise(Wrapped(8)).autocast == "unknown"


def test_dispatch_is_on_the_instance_not_the_class() -> None:
    assert recognise(ConvNextLayerNorm(40)).kind == "layer"
    with pytest.raises(UnrecognisedNorm):
        recognise(ConvNextLayerNorm(40, data_format="channels_first"))
    last, first = (
        ConvNextLayerNorm(40, data_format=f"channels_{end}") for end in ("last", "first")
    )
    assert recognition_key(last) != recognition_key(first)
    assert recognition_key(last) == recognition_key(ConvNextLayerNorm(40))
    assert recognition_key(nn.LayerNorm(8)) != recognition_key(nn.LayerNorm(8, bias=False))
    assert recognition_key(nn.LayerNorm(8))[1]
    last.config = object()  # type: ignore[assignment]
    assert not recognition_key(last)[1]  # good while the object lives


# --- norms that look like ours and are not ---------------------------------------------------


class Rms(nn.Module):
    def __init__(self, size: int = 40, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * (x.float() * self.scale(x.float()))).to(x.dtype)


class EpsOutsideRoot(Rms):
    def scale(self, x: Tensor) -> Tensor:
        return 1 / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class EpsClamps(Rms):
    def scale(self, x: Tensor) -> Tensor:
        return x.pow(2).mean(-1, keepdim=True).clamp_min(self.eps).rsqrt()


class EpsHardCoded(Rms):
    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class UnbiasedVariance(Rms):
    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + self.eps)


class Grouped(Rms):
    def scale(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, 8))
        return super().scale(groups).expand_as(groups).flatten(-2)


class OtherDimension(Rms):
    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(0, keepdim=True) + self.eps)


class DetachedStatistics(Rms):
    def scale(self, x: Tensor) -> Tensor:
        return super().scale(x).detach()


class OtherInTraining(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x + 1 if self.training else x)


class OtherForRank4(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.dim() < 4 else x


class AddsOneAndCentres(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class VarianceByDifference(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = x.pow(2).mean(-1, keepdim=True) - mean.pow(2)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@pytest.mark.parametrize(
    "module",
    [
        *(cls() for cls in Rms.__subclasses__()),
        AddsOneAndCentres(40),
        VarianceByDifference(40),
        NemotronLayerNorm1P(40),
        nn.Dropout(0.1),
        nn.GELU(),
        nn.LeakyReLU(0.1),
        nn.BatchNorm1d(40),
        nn.GroupNorm(4, 40),
        nn.LayerNorm((4, 10)),
        nn.Linear(40, 40),
    ],
    ids=lambda module: type(module).__name__,
)
def test_not_ours(module: nn.Module) -> None:
    with pytest.raises(UnrecognisedNorm):
        recognise(module)


def test_the_plain_form_of_the_lookalikes_is_ours() -> None:
    assert recognise(Rms()).describe() == "rms_norm, cast=fp32"


class RoundsBeforeOffset(Rms):
    """1 + w in w's dtype: ours adds in fp32, so half weights are not proven."""

    def forward(self, x: Tensor) -> Tensor:
        return ((1 + self.weight) * (x.float() * self.scale(x.float()))).to(x.dtype)


def test_dtypes_that_round_elsewhere_are_not_proven() -> None:
    spec = recognise(RoundsBeforeOffset())
    assert spec.weight_offset == 1.0
    assert spec.dtypes == {(x, FP32) for x in (FP32, BF16, FP16)}


class TwoFloats(Rms):
    """The eps is found by what it does, not by its name or place."""

    def __init__(self) -> None:
        super().__init__()
        self.momentum, self.tiny = 0.1, self.eps
        self.eps = 1e-3

    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.tiny)


def test_eps_and_weight_are_found_whatever_their_names() -> None:
    assert recognise(TwoFloats()).eps == "tiny"

    class BiasFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(40))  # the shift
            self.bias = nn.Parameter(torch.ones(40))  # the scale
            self.slack = 1e-5

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (40,), self.bias, self.weight, self.slack)

    spec = recognise(BiasFirst())
    assert (spec.weight, spec.bias, spec.eps) == ("bias", "weight", "slack")


@pytest.mark.parametrize("eps", [0.0, -1e-6, math.inf, math.nan])
def test_eps_that_no_operator_takes(eps: float) -> None:
    with pytest.raises(UnrecognisedNorm, match="eps is no finite number > 0"):
        recognise(LlamaRMSNorm(40, eps=eps))


def test_own_modules_are_not_patched_again() -> None:
    with pytest.raises(UnrecognisedNorm, match="by itself"):
        recognise(fusedops.RMSNorm(40))


# --- the proof leaves no trace ---------------------------------------------------------------


def test_proof_touches_neither_module_nor_global_state() -> None:
    calls: list[object] = []
    module = LlamaRMSNorm(40)
    module.weight.requires_grad_(False)
    module.register_forward_hook(lambda *args: calls.append(args))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = dict(vars(module))
    state = torch.get_rng_state()
    recognise(module)
    recognise_failed = nn.Dropout(0.5)
    with pytest.raises(UnrecognisedNorm):
        recognise(recognise_failed)
    assert torch.equal(torch.get_rng_state(), state)
    assert calls == []
    assert vars(module) == attributes
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not module.weight.requires_grad


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_proof_does_not_depend_on_grad_mode(context: type) -> None:
    with context():
        assert recognise(LlamaRMSNorm(40)).cast == "input"


def test_proof_does_not_depend_on_autocast_or_device() -> None:
    with torch.autocast("cpu", dtype=BF16):
        assert recognise(nn.LayerNorm(40)).dtypes == SAME_PAIRS
    with torch.device("meta"):
        module = LlamaRMSNorm(40)
        assert recognise(module).dtypes == ALL_PAIRS


def test_width_of_a_large_model_is_proven_in_time() -> None:
    assert recognise(LlamaRMSNorm(16384)).cast == "input"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_candidates_are_leaves_with_a_float_and_at_most_two_vectors() -> None:
    assert is_candidate(nn.LayerNorm(8))
    assert not is_candidate(nn.Linear(8, 8))
    assert not is_candidate(nn.Sequential(nn.LayerNorm(8)))
    assert not is_candidate(torch.jit.trace(nn.LayerNorm(8), torch.zeros(1, 8)))
