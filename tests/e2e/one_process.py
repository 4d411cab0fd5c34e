"""Real engines one after another in one process, which is far cheaper than a server each.

Each is vLLM's own engine core, model runner and scheduler with both halves of the connector and a
store daemon; only the API server and the process boundaries are missing. Run as a program: engines
as JSON lines on standard input, what they answered as JSON lines on standard output.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_ARGS = {
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "mamba_ssm_cache_dtype": "float32",
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 96,
    "distributed_executor_backend": "uni",
}
_IDLE_S = 20.0


def run(engine: Mapping[str, Any], model: str, store: str) -> dict[str, Any]:
    """Start an engine, ask it everything, stop it.

    ``engine``: ``args`` of ``LLM``, ``env``, and ``asks``; of each ``prompt`` (token ids),
    ``publish``, and ``forget``: empty the prefix cache before.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    get_conv_state_layout.cache_clear()
    os.environ.update(engine["env"])
    llm = LLM(
        **{"model": model, **_ARGS, **engine["args"]},
        kv_transfer_config={
            "kv_connector": "BackhaulConnector",
            "kv_connector_module_path": "backhaul.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "store": store,
                "stream_min_bytes": 1,
                "lookup_timeout_s": 5.0,
            },
        },
    )
    core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    half = core.scheduler.connector._half
    answers = []
    for ask in engine["asks"]:
        if ask["forget"]:
            assert llm.reset_prefix_cache()
        answers.append(_generate(llm, ask["prompt"], 4, publish=ask["publish"]))
        _settle(llm, half)
    domain = half._facts.domain.domain_id
    core.shutdown()
    del llm, core, half
    cleanup_dist_env_and_memory()
    return {"domain": domain, "answers": answers}


def _generate(llm: Any, prompt: list[int], tokens: int, *, publish: bool) -> dict[str, Any]:
    from vllm import SamplingParams

    transfer = {"backhaul": {"publish": publish}}
    (one,) = llm.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": transfer},
        ),
        use_tqdm=False,
    )
    return {
        "tokens": list(one.outputs[0].token_ids),
        "cached_tokens": one.num_cached_tokens,
        "backhaul": one.kv_transfer_params["backhaul"],
    }


def _settle(llm: Any, half: Any) -> None:
    """An engine in this process makes a step only where it is asked for one."""
    deadline = time.monotonic() + _IDLE_S
    while any(half.gauges().values()):
        assert time.monotonic() < deadline, f"still held: {half.gauges()}"
        _generate(llm, [97], 1, publish=False)


def main() -> None:
    """See the module."""
    model, store = sys.argv[1:]
    os.environ.update(_ENV)
    # vLLM collects a dozen times per engine, each time half a second over all that was imported.
    gc.collect = lambda generation=2: 0  # type: ignore[assignment]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for line in sys.stdin:
        began = time.monotonic()
        engine = json.loads(line)
        print(json.dumps(run(engine, model, store)), file=answers, flush=True)
        print(f"{engine['name']}: {time.monotonic() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
