# SPDX-License-Identifier: Apache-2.0
"""Leaf ops, stages, and the state around them."""
