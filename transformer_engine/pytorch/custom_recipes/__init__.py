# SPDX-License-Identifier: Apache-2.0
"""Ready-made factories for ``CustomRecipe(qfactory=...)``."""
