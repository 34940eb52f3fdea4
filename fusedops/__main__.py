# SPDX-License-Identifier: Apache-2.0
"""``python -m fusedops`` is the ``fusedops`` command."""

import sys

from fusedops.cli import main

if __name__ == "__main__":
    sys.exit(main())
