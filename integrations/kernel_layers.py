# SPDX-License-Identifier: Apache-2.0
"""fusedops' norms as layers for Hugging Face's `kernels`, which replaces layers by their names.

For those who pick their kernels with ``kernelize`` and want no residual fusion. Nothing is fetched:
the layer comes from this package.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from fusedops.integrations.patching import patch

__all__ = ["FusedNorm", "LocalNorm", "kernel_mapping"]


class FusedNorm(nn.Module):
    """What `kernels` binds into a norm in place of its forward; it has no state, as it demands.

    Called first, it patches the norm that it was put into and steps aside, so that the name alone
    decides nothing: norms that agree with no operator keep their own code, `patch` takes the
    others for patched, and `unpatch` undoes it.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _step_aside(self, hidden_states)


def _step_aside(module: nn.Module, x: Tensor) -> Tensor:
    if not is_compiling():
        state = vars(module)
        if _is_ours(state.get("forward")):
            del state["forward"]
        if _is_ours(state.get("_old_forward")):  # accelerate has hooked the module since
            state["_old_forward"] = MethodType(type(module).forward, module)
        with suppress(ValueError):  # not one of our norms
            patch(module, fuse_residual=False)
    return type(module).forward(module, x)


def _is_ours(forward: Any) -> bool:
    return getattr(forward, "__func__", None) is FusedNorm.forward


@dataclass(frozen=True)
class LocalNorm:
    """Where `kernels` takes `FusedNorm` from: what it calls a layer repository."""

    layer_name: str = FusedNorm.__name__

    def load(self) -> type[nn.Module]:
        return FusedNorm


def kernel_mapping(devices: Iterable[str] = ("cuda",)) -> dict[str, dict[str, LocalNorm]]:
    """A mapping for ``kernels.use_kernel_mapping``: fusedops for all norms, in every mode.

    >>> mapping = kernel_mapping()
    >>> sorted(mapping)
    ['LayerNorm', 'RMSNorm', 'RMSNormZeroCentered']

    To be used so, where ``kernels`` is installed::

        with use_kernel_mapping(kernel_mapping(), inherit_mapping=False):
            kernelize(model, mode=Mode.TRAINING, device="cuda")
    """
    names = ("RMSNorm", "RMSNormZeroCentered", "LayerNorm")
    return {name: {device: LocalNorm() for device in devices} for name in names}
