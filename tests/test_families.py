# SPDX-License-Identifier: Apache-2.0
"""Every causal LM, encoder and encoder-decoder that transformers builds tiny, patched.

``docs/families.py`` makes the models; nothing here or there names what a family is made of.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedops import dispatch
from fusedops.integrations import patch, unpatch
from fusedops.integrations.patching import force_operators


def _load_families() -> ModuleType:
    path = Path(__file__).parent.parent / "docs" / "families.py"
    spec = importlib.util.spec_from_file_location("families", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["families"] = module
    spec.loader.exec_module(module)
    return module


families = _load_families()
LANGUAGE = [family for family in families.families() if family.task != "vision or audio"]
covered: set[str] = set()

pytestmark = pytest.mark.filterwarnings("ignore")  # what tiny random models lack is no matter here


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) and torch.equal(x.isnan(), y.isnan())
        for x, y in zip(a, b, strict=True)
    )


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference, relative to the largest value."""
    return max(
        ((x - y).abs().max() / y.abs().max().clamp_min(1e-6)).item()
        for x, y in zip(a, b, strict=True)
    )


def run(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[list[Tensor], int]:
    """Outputs, and how many adds were fused."""
    with dispatch.count_calls() as calls:
        outputs = families.run(model, inputs)
    return outputs, sum(count for (name, _), count in calls.items() if name.startswith("add_"))


@pytest.mark.parametrize("family", LANGUAGE, ids=str)
def test_family(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    with families.quiet():
        try:
            model, inputs = family.build()
        except RuntimeError as error:
            pytest.skip(f"cannot be built tiny: {error}")
        expected, _ = run(model, inputs)
        types = [type(module) for module in model.modules()]

        try:
            patch(model)
        except ValueError as error:
            pytest.skip(str(error))
        assert equal(run(model, inputs)[0], expected), "patched, on a CPU without kernels"
        unpatch(model)

        with force_operators():
            patch(model, fuse_residual=False)
            norms_alone, _ = run(model, inputs)
            assert distance(norms_alone, expected) < 1e-4
            unpatch(model)
            report = patch(model)
            for _ in range(3):
                found, fused = run(model, inputs)
                assert equal(found, norms_alone), "adds fused"
        assert fused or all(row.why for row in report.fused), "nothing fused, and no reason"

        unpatch(model)
        assert [type(module) for module in model.modules()] == types
        assert equal(run(model, inputs)[0], expected), "unpatched"
    covered.add(str(family))


def test_enough_families(request: pytest.FixtureRequest) -> None:
    """150 of the 208 that transformers 5.24 builds tiny; fewer exist in version 4."""
    collected = [item for item in request.session.items if item.name.startswith("test_family[")]
    if len(collected) < len(LANGUAGE) or hasattr(request.config, "workerinput"):
        pytest.skip("only part of the families ran in this process")
    assert len(covered) >= (150 if families.transformers.__version__ >= "5" else 130)


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        *((name, torch.float32) for name in ("llama", "gpt2", "gemma2", "bert", "t5", "cohere")),
        *((name, torch.float16) for name in ("llama", "gpt2", "gemma2", "bert", "opt")),
    ],
)
def test_fused_adds_give_the_bits_of_norms_alone_on_the_kernels(
    model_type: str, dtype: torch.dtype, device: str, kernels_run: None
) -> None:
    (family,) = (family for family in LANGUAGE if family.model_type == model_type)
    with families.quiet():
        model, inputs = family.build()
        model.to(device, dtype)
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        unpatched, _ = run(model, inputs)
        patch(model, fuse_residual=False)
        norms_alone, _ = run(model, inputs)
        unpatch(model)
        patch(model)
        for _ in range(2):
            found, fused = run(model, inputs)
    assert fused > 0
    assert equal(found, norms_alone)
    # The original rounds its statistics in another order; in fp16 that flips single roundings.
    assert distance(found, unpatched) < (1e-4 if dtype == torch.float32 else 0.02)
