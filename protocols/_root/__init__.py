"""Backhaul: carries finalized decode checkpoints back to prefill workers of a vLLM P/D cluster.

This root package holds the version and nothing else: importing it imports no sub-package.
"""

__version__ = "0.1.0"
