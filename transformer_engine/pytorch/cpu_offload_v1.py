# SPDX-License-Identifier: Apache-2.0
"""Another name for ``cpu_offload``: the reference package keeps an older implementation here."""

from .cpu_offload import *  # pylint: disable=wildcard-import,unused-wildcard-import
