# SPDX-License-Identifier: Apache-2.0
"""Leaf ops as ONNX has them, and their translation."""
