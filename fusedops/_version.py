# SPDX-License-Identifier: Apache-2.0
"""The one place that holds the version."""

__all__ = ["__version__"]

__version__ = "0.1.0"
