"""Real engines one after another in one process, which is far cheaper than a server each.

Each is vLLM's own engine core, model runner and scheduler with both halves of the connector and a
store daemon; only the API server and the process boundaries are missing. Run as a program: engines
as JSON lines on standard input, what they answered as JSON lines on standard output. ``OneProcess``
is the other end of it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

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


class OneProcess:
    """Starts the program and has it run engines."""

    def __init__(self, model: Path, log: Path, env: Mapping[str, str]) -> None:
        self._command = [sys.executable, __file__, str(model)]
        self._log = log
        self._env = {**os.environ, **env}

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._env,
            )
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            self._process.kill()
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def run(self, engine: Mapping[str, Any]) -> dict[str, Any]:
        """See the function of that name."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(engine) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, self._log.read_text()[-3000:]
        return dict(json.loads(answer))


def run(engine: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Start an engine, ask it everything, stop it.

    ``engine``: its ``name`` and ``store``; ``args`` of ``LLM`` and ``env``; ``role`` and
    ``options`` of the connector; ``hears``: wait for a line about publication paths before
    anything is asked; ``stays``: it is not gone from the store's table of engines when it was
    stopped, as one that goes on; and ``asks``, of each the ``prompt`` (token ids), ``reply``
    (tokens), ``backhaul`` (the request's hints), and ``forget``: empty the prefix cache before.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    get_conv_state_layout.cache_clear()
    os.environ.update(engine["env"])
    with _said() as said:
        llm = LLM(
            **{"model": model, **_ARGS, **engine["args"]},
            kv_transfer_config={
                "kv_connector": "BackhaulConnector",
                "kv_connector_module_path": "backhaul.connector",
                "kv_role": engine["role"],
                "kv_connector_extra_config": {
                    "store": engine["store"],
                    "stream_min_bytes": 1,
                    "lookup_timeout_s": 5.0,
                    **engine["options"],
                },
            },
        )
        core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        half = core.scheduler.connector._half
        deadline = time.monotonic() + _IDLE_S
        while engine["hears"] and not said and time.monotonic() < deadline:
            time.sleep(0.05)
        said_at_start = list(said)
        answers = []
        for ask in engine["asks"]:
            if ask["forget"]:
                assert llm.reset_prefix_cache()
            answers.append(_generate(llm, ask["prompt"], ask["reply"], ask["backhaul"]))
            _settle(llm, half)
        if engine["hears"]:  # a reply without a path has the engine look for one again, soon
            time.sleep(1.5)
        domain = half._facts.domain.domain_id
        if engine["stays"]:  # its thread goes on telling the store that the engine is there
            core.scheduler = None
        core.shutdown()
    del llm, core, half
    cleanup_dist_env_and_memory()
    return {
        "domain": domain,
        "answers": answers,
        "said_at_start": said_at_start,
        "said_later": said[len(said_at_start) :],
    }


@contextmanager
def _said() -> Iterator[list[str]]:
    """What the connector says about publication paths. Heard by a filter: vLLM takes handlers away
    where it configures its loggers anew for an engine."""
    lines: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        if "publication path" in record.getMessage():
            lines.append(record.getMessage())
        return True

    logger = logging.getLogger("vllm.backhaul")
    logger.addFilter(hear)
    try:
        yield lines
    finally:
        logger.removeFilter(hear)


def _generate(
    llm: Any, prompt: list[int], tokens: int, backhaul: Mapping[str, Any]
) -> dict[str, Any]:
    from vllm import SamplingParams

    (one,) = llm.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"backhaul": backhaul}},
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
        _generate(llm, [97], 1, {"publish": False})


def main() -> None:
    """See the module."""
    (model,) = sys.argv[1:]
    os.environ.update(_ENV)
    # vLLM collects a dozen times per engine, each time half a second over all that was imported.
    gc.collect = lambda generation=2: 0  # type: ignore[assignment]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for line in sys.stdin:
        began = time.monotonic()
        engine = json.loads(line)
        print(json.dumps(run(engine, model)), file=answers, flush=True)
        print(f"{engine['name']}: {time.monotonic() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
