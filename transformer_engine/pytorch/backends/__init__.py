# SPDX-License-Identifier: Apache-2.0
"""Implementations of the leaf ops, and the table that picks one."""
