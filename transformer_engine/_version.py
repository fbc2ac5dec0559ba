# SPDX-License-Identifier: Apache-2.0
"""The version of this package: the level of the public API that it implements."""

__version__ = "2.20.2"
