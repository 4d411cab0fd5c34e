"""Puts this folder's modules on the path, and skips the simulations where vLLM is absent."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("vllm")
