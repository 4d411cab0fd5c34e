"""vLLM engines and the store daemon as services on one machine."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from backhaul.deploy.processes import Progress, Service, free_port
from backhaul.protocols.options import WorkerKind
from backhaul.transfer.daemon.settings import Address

ANY_PORT = Address("127.0.0.1", 0)

WORKER_TITLE = "VLLM::Worker"
"""How vLLM names the processes that run the model."""

# Set for every engine; an engine's own ``env`` wins. Why each one:
DEFAULT_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes most of the machine
    "OMP_NUM_THREADS": "1",  # engines that share cores crawl when their threads spin
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # NIXL transfers of convolution states need it
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",  # not every machine resolves "localhost"
    "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler takes longer than a test
    # NIXL's progress threads would take half of the only core that an engine has.
    "BACKHAUL_NIXL_PROGRESS_DELAY_US": "20000",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# On accelerators the engine's own choices are the good ones.
GPU_ENV = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS", "VLLM_NO_USAGE_STATS": "1"}
GPU_ARGS = (
    "--host=127.0.0.1",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
)
DEFAULT_ARGS = (
    "--host=127.0.0.1",
    "--enforce-eager",
    "--enable-prefix-caching",
    "--mamba-ssm-cache-dtype=float32",
    "--block-size=32",
    "--max-model-len=16384",
    "--enable-prompt-tokens-details",
)


@dataclass(frozen=True)
class EngineSpec:
    """What one engine runs.

    ``cores`` is a core id, or ``"0|1"`` for one core per tensor-parallel rank. ``gpus`` is what
    ``CUDA_VISIBLE_DEVICES`` gets; with it the engine is not bound to cores. ``args`` come last on
    the command line; ``env`` is laid over the defaults.
    """

    name: str
    model: Path
    cores: str = ""
    gpus: str = ""
    port: int = field(default_factory=free_port)
    kv_transfer_config: Mapping[str, object] | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Engine(Service):
    """One vLLM API server process with its engine core and workers."""

    def __init__(self, spec: EngineSpec, log_dir: Path) -> None:
        super().__init__(spec.name, log_dir)
        self.spec = spec

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API, without a trailing slash."""
        return f"http://127.0.0.1:{self.spec.port}"

    @property
    def health_url(self) -> str:
        return f"{self.url}/health"

    def command(self) -> list[str]:
        spec = self.spec
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--model={spec.model}", f"--served-model-name={spec.model.name}"]
        command += [f"--port={spec.port}", *(GPU_ARGS if spec.gpus else DEFAULT_ARGS)]
        if spec.kv_transfer_config is not None:
            # A new one at every start: peers keep what they learnt of an id.
            named = {"engine_id": f"{spec.name}-{uuid.uuid4().hex[:8]}", **spec.kv_transfer_config}
            command.append(f"--kv-transfer-config={json.dumps(named)}")
        return [*command, *spec.args]

    def check_healthy(self, timeout_s: float, on_progress: Progress | None = None) -> bool:
        healthy = super().check_healthy(timeout_s, on_progress)
        if healthy and self.spec.cores:
            self.bind_workers()
        return healthy

    def bind_workers(self) -> None:
        """Bind each worker's threads to its rank's cores again.

        vLLM's NixlConnector moves the model thread of every CPU worker to the machine's last core
        (``nixl/base_worker.py``), away from ``VLLM_CPU_OMP_THREADS_BIND``: two engines then share
        one core, and with threads that wait by ``sched_yield`` one of them was seen to get no time
        at all for 30 s.
        """
        workers = [p for p in self.processes() if _title(p).startswith(WORKER_TITLE)]
        workers.sort(key=lambda process: process.create_time())
        for worker, cores in zip(workers, self.spec.cores.split("|"), strict=False):
            with suppress(psutil.NoSuchProcess):
                for thread in worker.threads():
                    with suppress(ProcessLookupError):  # a thread that has ended
                        os.sched_setaffinity(thread.id, core_ids(cores))

    def environment(self) -> dict[str, str]:
        own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        if self.spec.gpus:
            own["CUDA_VISIBLE_DEVICES"] = self.spec.gpus
        if self.spec.cores:
            own["VLLM_CPU_OMP_THREADS_BIND"] = self.spec.cores
        defaults = GPU_ENV if self.spec.gpus else DEFAULT_ENV
        return {**os.environ, **defaults, **own, **self.spec.env}


class StoreDaemon(Service):
    """One ``backhaul store`` process. Port 0 of an address is a free one."""

    def __init__(
        self,
        log_dir: Path,
        *,
        name: str = "store",
        capacity: str = "512MiB",
        listen: Address = ANY_PORT,
        http: Address = ANY_PORT,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, log_dir)
        self._capacity = capacity
        self._args = tuple(args)
        self._env = dict(env or {})
        self._grpc = listen._replace(port=listen.port or free_port())
        self._http = http._replace(port=http.port or free_port())

    @property
    def settings(self) -> tuple[str, tuple[str, ...]]:
        """What ``configure`` takes: the capacity, and further arguments."""
        return self._capacity, self._args

    def configure(self, capacity: str, args: Sequence[str] = ()) -> None:
        """What the next start is given; the addresses stay."""
        self._capacity = capacity
        self._args = tuple(args)

    @property
    def uri(self) -> str:
        """The store's address for ``kv_connector_extra_config``."""
        return f"backhaul://{self._grpc.from_here}"

    @property
    def http_url(self) -> str:
        """Base URL of the status page, ``/healthz`` and ``/metrics``."""
        return f"http://{self._http.from_here}"

    @property
    def health_url(self) -> str:
        return f"{self.http_url}/healthz"

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "backhaul.deploy.cli", "store"),
            *("--listen", str(self._grpc), "--http", str(self._http)),
            *("--capacity", self._capacity, *self._args),
        ]

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self._env}


def backhaul_config(store: str, role: str = "kv_both", **options: object) -> dict[str, object]:
    """``--kv-transfer-config`` of an engine that runs Backhaul alone."""
    return {
        "kv_connector": "BackhaulConnector",
        "kv_connector_module_path": "backhaul.connector",
        "kv_role": role,
        "kv_connector_extra_config": {"store": store, **options},
    }


NIXL_ROLES = {WorkerKind.PREFILL: "kv_producer", WorkerKind.DECODE: "kv_consumer"}
"""As NixlConnector wants them; Backhaul reads the worker's kind from them."""


def pair_config(
    store: str | None,
    kind: WorkerKind = WorkerKind.BOTH,
    *,
    buffer_device: str = "cpu",
    **options: object,
) -> dict[str, object]:
    """``--kv-transfer-config`` of one engine of a P/D pair: NIXL hands prefill -> decode over;
    with a store, Backhaul carries decode -> prefill."""
    nixl = {"kv_role": NIXL_ROLES.get(kind, "kv_both"), "kv_buffer_device": buffer_device}
    children: list[dict[str, object]] = [{"kv_connector": "NixlConnector", **nixl}]
    if store is not None:
        child = backhaul_config(store, "kv_both", **options)
        # MultiConnector resolves metrics by registered name: the plugin registers ours.
        del child["kv_connector_module_path"]
        children.append(child)
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }


def _title(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def core_ids(cores: str) -> set[int]:
    """``"0-3,8"`` as a set."""
    ids: set[int] = set()
    for part in cores.split(","):
        first, _, last = part.partition("-")
        ids |= set(range(int(first), int(last or first) + 1))
    return ids
