# SPDX-License-Identifier: Apache-2.0
"""torch.compile support: module ops, fakes, capability checks."""
