# SPDX-License-Identifier: Apache-2.0
"""Version, environment set-up and source checks; used by setup.py and qa/, not installed."""
