# SPDX-License-Identifier: Apache-2.0
"""The parts of ``make_graphed_callables``; see ``graph.py``."""
