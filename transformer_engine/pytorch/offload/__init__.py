# SPDX-License-Identifier: Apache-2.0
"""Keeps what autograd saves on the CPU between forward and backward; see ``cpu_offload.py``."""
