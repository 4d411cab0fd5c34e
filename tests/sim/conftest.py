"""The simulations need vLLM; without it nothing here is collected."""

from importlib.util import find_spec

collect_ignore_glob = ["*.py"] if find_spec("vllm") is None else []
