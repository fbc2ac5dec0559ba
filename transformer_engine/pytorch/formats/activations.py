# SPDX-License-Identifier: Apache-2.0
"""The activations of ``LayerNormMLP``: one table for modules, fakes and backends."""

from __future__ import annotations

# name -> (nonlinearity, gated). Of a gated activation the input has twice the output's width; the
# first half is activated and multiplied by the second.
ACTIVATIONS = {
    "gelu": ("gelu", False),
    "geglu": ("gelu", True),
    "glu": ("sigmoid", True),
    "qgelu": ("qgelu", False),
    "qgeglu": ("qgelu", True),
    "relu": ("relu", False),
    "reglu": ("relu", True),
    "srelu": ("srelu", False),
    "sreglu": ("srelu", True),
    "silu": ("silu", False),
    "swiglu": ("silu", True),
    "clamped_swiglu": ("scaled_silu", True),
}


def is_gated(name: str) -> bool:
    """Whether the activation halves the width of its input."""
    return ACTIVATIONS[name][1]


def activation_width(name: str, input_width):
    """Width of the activation's output for an input of ``input_width`` (int or SymInt)."""
    return input_width // 2 if is_gated(name) else input_width
