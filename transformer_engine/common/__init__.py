# SPDX-License-Identifier: Apache-2.0
"""What does not depend on a framework: the quantization recipes and their environment variables."""

from . import recipe

__all__ = ["recipe"]
