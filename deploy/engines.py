"""Starts vLLM engines as child processes on CPU cores and leaves none behind.

One :class:`Engine` is one OpenAI API server with its engine core and workers. A :class:`Cluster`
runs several and stops all of them however its block is left.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import httpx
import psutil

# Set for every engine; an engine's own ``env`` wins. Why each one:
DEFAULT_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes most of the machine
    "OMP_NUM_THREADS": "1",  # engines that share cores crawl when their threads spin
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # NIXL transfers of convolution states need it
    "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler takes longer than a test
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
DEFAULT_ARGS = (
    "--host=127.0.0.1",
    "--enforce-eager",
    "--enable-prefix-caching",
    "--mamba-cache-mode=align",
    "--mamba-ssm-cache-dtype=float32",
    "--block-size=32",
    "--max-model-len=16384",
)
LOG_LINES_IN_ERROR = 15
POLL_INTERVAL_S = 0.25

Progress = Callable[[str, float], None]
"""Called with an engine's name and the seconds since it started, while it is not yet healthy."""


class EngineError(RuntimeError):
    """An engine ended early or did not become healthy."""


def free_port() -> int:
    """Return a TCP port on the loopback interface that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class EngineSpec:
    """What one engine runs.

    ``cores`` is a core id, or ``"0|1"`` for one core per tensor-parallel rank. ``args`` come last
    on the command line; ``env`` is laid over the defaults.
    """

    name: str
    model: Path
    cores: str
    port: int = field(default_factory=free_port)
    kv_transfer_config: Mapping[str, object] | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Engine:
    """One vLLM API server process and everything that it spawned."""

    def __init__(self, spec: EngineSpec, log_dir: Path) -> None:
        self.spec = spec
        self.log_path = log_dir / f"{spec.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API, without a trailing slash."""
        return f"http://127.0.0.1:{self.spec.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the API server; None before :meth:`start` and after :meth:`stop`."""
        return self._process.pid if self._process else None

    def command(self) -> list[str]:
        """Return the command line that :meth:`start` runs."""
        spec = self.spec
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--model={spec.model}", f"--served-model-name={spec.model.name}"]
        command += [f"--port={spec.port}", *DEFAULT_ARGS]
        if spec.kv_transfer_config is not None:
            command.append(f"--kv-transfer-config={json.dumps(dict(spec.kv_transfer_config))}")
        return [*command, *spec.args]

    def environment(self) -> dict[str, str]:
        """Return the environment that :meth:`start` runs the command in."""
        own = {
            "VLLM_CPU_OMP_THREADS_BIND": self.spec.cores,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        return {**os.environ, **DEFAULT_ENV, **own, **self.spec.env}

    def start(self) -> None:
        """Start the server; return at once. Its output goes to :attr:`log_path`."""
        if self._process is not None:
            raise EngineError(f"engine {self.spec.name} already runs: stop it before starting it")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own keeps the terminal's Ctrl-C away from the engine, and marks
                # children that outlive the server as ours.
                start_new_session=True,
            )
        self._started_at = time.monotonic()

    def wait_healthy(self, timeout_s: float, on_progress: Progress | None = None) -> None:
        """Block until the server answers ``/health``.

        Raises :class:`EngineError` with the end of the log if the server exits first or needs more
        than ``timeout_s`` seconds from its start.
        """
        if self._process is None:
            raise EngineError(f"engine {self.spec.name} is not running: start it first")
        while True:
            age_s = time.monotonic() - self._started_at
            if (code := self._process.poll()) is not None:
                raise EngineError(
                    f"engine {self.spec.name} exited with code {code} after {age_s:.0f} s; "
                    f"see {self.log_path}:\n{self._log_tail()}"
                )
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=2.0).is_success:
                    return
            if age_s > timeout_s:
                raise EngineError(
                    f"engine {self.spec.name} is not healthy after {timeout_s:.0f} s; "
                    f"see {self.log_path}:\n{self._log_tail()}"
                )
            if on_progress:
                on_progress(self.spec.name, age_s)
            time.sleep(POLL_INTERVAL_S)

    def stop(self, grace_s: float = 10.0) -> None:
        """End the server and all its descendants; kill what is left after ``grace_s`` seconds."""
        stop_all([self], grace_s)

    def processes(self) -> list[psutil.Process]:
        """Return the server's process and all its descendants, also those it no longer owns."""
        if self._process is None:
            return []
        found = {p.pid: p for p in _session_members(self._process.pid)}
        # Once the server was waited for, its pid may belong to a stranger.
        if self._process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                server = psutil.Process(self._process.pid)
                found |= {p.pid: p for p in (server, *server.children(recursive=True))}
        return list(found.values())

    def terminate(self) -> None:
        """Ask the server to end; it ends its workers itself. Use :meth:`stop` to be sure."""
        if self._process is not None:
            self._process.terminate()

    def reap(self) -> None:
        """Forget an ended server, so that :meth:`start` can run it again."""
        if self._process is not None:
            self._process.wait()
            self._process = None

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_IN_ERROR:])


def _session_members(session: int) -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session:
                yield process


def stop_all(engines: Sequence[Engine], grace_s: float = 10.0) -> None:
    """Stop several engines at once; an interruption while waiting kills them right away."""
    try:
        for engine in engines:
            engine.terminate()
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(_running(e) for e in engines):
            time.sleep(0.05)
    finally:
        for engine in engines:
            while left := _running(engine):
                for process in left:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs(left, timeout=1.0)
            engine.reap()


def _running(engine: Engine) -> list[psutil.Process]:
    return [p for p in engine.processes() if _alive(p)]


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


class Cluster:
    """Engines that run for the length of a ``with`` block.

    They start side by side; the block is entered once all are healthy. However it is left, by its
    end, an exception, Ctrl-C or SIGTERM, every process is gone afterwards. SIGTERM ends the block
    with ``SystemExit`` (only when it is entered on the main thread, as Python requires).
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        log_dir: Path,
        *,
        timeout_s: float = 300.0,
        on_progress: Progress | None = None,
    ) -> None:
        self.engines = {spec.name: Engine(spec, log_dir) for spec in specs}
        if len(self.engines) != len(specs):
            names = [spec.name for spec in specs]
            raise ValueError(f"engine names {names} are not unique: give each engine its own name")
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._previous_handler: signal.Handlers | Callable[..., object] | int | None = None

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, _exit_on_signal)
        try:
            for engine in self.engines.values():
                engine.start()
            for engine in self.engines.values():
                engine.wait_healthy(self._timeout_s, self._on_progress)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        try:
            stop_all(list(self.engines.values()))
        finally:
            if self._previous_handler is not None:
                signal.signal(signal.SIGTERM, self._previous_handler)
                self._previous_handler = None


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
