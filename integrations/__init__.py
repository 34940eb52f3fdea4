# SPDX-License-Identifier: Apache-2.0
"""fusedops in models that nobody rewrote: patch them, and prove that nothing changed."""

from fusedops.integrations.kernel_layers import kernel_mapping
from fusedops.integrations.loading import load
from fusedops.integrations.parity import check_parity
from fusedops.integrations.parity_report import ParityReport
from fusedops.integrations.patching import patch, patched, unpatch
from fusedops.integrations.report import PatchReport
from fusedops.integrations.warmup import describe_patched
from fusedops.precompile import describe_by

__all__ = [
    "ParityReport",
    "PatchReport",
    "check_parity",
    "kernel_mapping",
    "load",
    "patch",
    "patched",
    "unpatch",
]

describe_by(describe_patched)  # whoever has a patched model has imported this package
