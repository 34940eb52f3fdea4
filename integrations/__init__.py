# SPDX-License-Identifier: Apache-2.0
"""fusedops in models that nobody rewrote: patch them, and prove that nothing changed."""

from fusedops.integrations.patching import patch, patched, unpatch
from fusedops.integrations.report import PatchReport

__all__ = ["PatchReport", "patch", "patched", "unpatch"]
