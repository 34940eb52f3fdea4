# SPDX-License-Identifier: Apache-2.0
"""Fused residual-add + norm operators in Triton for transformer blocks.

    >>> import torch, fusedops
    >>> x, residual = torch.randn(2, 4, 64), torch.randn(2, 4, 64)
    >>> weight = torch.ones(64)
    >>> y, summed = fusedops.add_rms_norm(x, residual, weight)
    >>> torch.equal(summed, residual + x)
    True

The functions run Triton kernels on GPU tensors and a plain torch reference elsewhere.
``fusedops.integrations`` puts them into Hugging Face models and proves the result.
"""

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "setup.cfg").is_file() and (_ROOT / "kernels").is_dir():
    # A checkout that is not installed: kernels/ and integrations/ stand beside this folder.
    __path__.append(str(_ROOT))

from fusedops._version import __version__  # noqa: E402
from fusedops.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm  # noqa: E402
from fusedops.nn import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm  # noqa: E402
from fusedops.precompile import NormShape, warmup  # noqa: E402

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "LayerNorm",
    "NormShape",
    "RMSNorm",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "rms_norm",
    "warmup",
]
