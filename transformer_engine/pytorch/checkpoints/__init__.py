# SPDX-License-Identifier: Apache-2.0
"""Reading the module state in checkpoints of the reference package without executing anything."""
