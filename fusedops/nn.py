# SPDX-License-Identifier: Apache-2.0
"""The operators as modules."""

import torch
from torch import Tensor, nn

from fusedops import functional

__all__ = ["AddLayerNorm", "AddRMSNorm", "LayerNorm", "RMSNorm"]


class RMSNorm(nn.RMSNorm):
    """stub replaced below"""


class LayerNorm(nn.LayerNorm):
    """stub replaced below"""


class AddRMSNorm(RMSNorm):
    """stub replaced below"""


class AddLayerNorm(LayerNorm):
    """stub replaced below"""
