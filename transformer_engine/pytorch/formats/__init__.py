# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the low-precision formats in plain torch: no state, no knowledge of modules."""
