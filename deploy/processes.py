"""Starts services as child processes and leaves none behind.

A :class:`Service` is one process with everything that it spawned and a health address. A
:class:`Cluster` runs several and stops all of them however its block is left.
"""

from __future__ import annotations

import abc
import atexit
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import httpx
import psutil

LOG_LINES_IN_ERROR = 15
POLL_INTERVAL_S = 0.25
ENDING_S = 5.0
"""From a broken connection to the end of the process behind it, at most."""

Progress = Callable[[str, float, bool], None]
"""Called with a service's name, the seconds since it started, and whether it is healthy."""


class ServiceError(RuntimeError):
    """A service ended early or did not become healthy."""


_PORTS = range(20_000, 30_000)
"""Below the range from which Linux takes ports for outgoing connections (32768 on): an engine
binds some of its ports only after most of its start, and must still find them free."""

_given: set[int] = set()


def free_port() -> int:
    """Return a TCP port on the loopback interface that nothing listens on at the moment, and that
    this process has not been given before. Raises ``ServiceError`` where there is none."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if port in _given:
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise ServiceError(f"no free port in {_PORTS.start} ... {_PORTS.stop - 1} on 127.0.0.1")


class Service(abc.ABC):
    """One process and everything that it spawned, logging to ``<log_dir>/<name>.log``."""

    def __init__(self, name: str, log_dir: Path) -> None:
        self.name = name
        self.log_path = log_dir / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    @abc.abstractmethod
    def command(self) -> list[str]:
        """Return the command line that :meth:`start` runs."""

    @abc.abstractmethod
    def environment(self) -> dict[str, str]:
        """Return the environment that :meth:`start` runs the command in."""

    @property
    @abc.abstractmethod
    def health_url(self) -> str:
        """Address that answers with success once the service is ready."""

    @property
    def pid(self) -> int | None:
        """Process id; None before :meth:`start` and after :meth:`stop`."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process; return at once. Its output is appended to :attr:`log_path`."""
        if self._process is not None:
            raise ServiceError(f"{self.name} already runs: stop it before starting it")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own keeps the terminal's Ctrl-C away from the service, and marks
                # children that outlive it as ours.
                start_new_session=True,
            )
        self._started_at = time.monotonic()

    def wait_healthy(self, timeout_s: float, on_progress: Progress | None = None) -> None:
        """Block until the service answers at its health address.

        Raises :class:`ServiceError` with the end of the log if the process exits first or needs
        more than ``timeout_s`` seconds from its start.
        """
        while not self.check_healthy(timeout_s, on_progress):
            time.sleep(POLL_INTERVAL_S)

    def check_healthy(self, timeout_s: float, on_progress: Progress | None = None) -> bool:
        """Ask once; see :meth:`wait_healthy` for what it raises."""
        self.check_running()
        age_s = time.monotonic() - self._started_at
        healthy = False
        with suppress(httpx.TransportError):
            healthy = self.is_ready(httpx.get(self.health_url, timeout=2.0))
        if not healthy and age_s > timeout_s:
            raise ServiceError(
                f"{self.name} is not healthy after {timeout_s:.0f} s; "
                f"see {self.log_path}:\n{self.log_tail()}"
            )
        if on_progress:
            on_progress(self.name, age_s, healthy)
        return healthy

    def is_ready(self, answer: httpx.Response) -> bool:
        """Whether what the health address answered means that the service is ready."""
        return answer.is_success

    def check_running(self) -> None:
        """Raise :class:`ServiceError` with the end of the log if the process has ended."""
        if self._process is None:
            raise ServiceError(f"{self.name} is not running: start it first")
        if (code := self._process.poll()) is not None:
            age_s = time.monotonic() - self._started_at
            raise ServiceError(
                f"{self.name} exited with code {code} after {age_s:.0f} s; "
                f"see {self.log_path}:\n{self.log_tail()}"
            )

    def stop(self, grace_s: float = 10.0) -> None:
        """End the process and all its descendants; kill what is left after ``grace_s`` seconds."""
        stop_all([self], grace_s)

    def kill(self) -> None:
        """Kill the process and all its descendants at once, as a crash would."""
        stop_all([self], 0.0)

    def processes(self) -> list[psutil.Process]:
        """Return the process and all its descendants, also those it no longer owns."""
        if self._process is None:
            return []
        found = {p.pid: p for p in _session_members(self._process.pid)}
        # Once the process was waited for, its pid may belong to a stranger.
        if self._process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                server = psutil.Process(self._process.pid)
                found |= {p.pid: p for p in (server, *server.children(recursive=True))}
        return list(found.values())

    def terminate(self) -> None:
        """Ask the process to end; it ends its children itself. Use :meth:`stop` to be sure."""
        if self._process is not None:
            self._process.terminate()

    def reap(self) -> int | None:
        """Forget an ended process, so that :meth:`start` can run it again; return its exit code."""
        code = None
        if self._process is not None:
            code = self._process.wait()
            self._process = None
        return code

    def log_tail(self) -> str:
        """The last lines of the log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_IN_ERROR:])


def _session_members(session: int) -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session:
                yield process


def stop_all(services: Sequence[Service], grace_s: float = 10.0) -> None:
    """Stop several services at once; an interruption while waiting kills them right away, and one
    while they are killed comes after that."""
    try:
        if grace_s > 0:
            for service in services:
                service.terminate()
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(_running(s) for s in services):
            time.sleep(0.05)
    finally:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            for service in services:
                while left := _running(service):
                    for process in left:
                        with suppress(psutil.NoSuchProcess):
                            process.kill()
                    psutil.wait_procs(left, timeout=1.0)
                service.reap()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _running(service: Service) -> list[psutil.Process]:
    return [p for p in service.processes() if _alive(p)]


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


class Cluster:
    """Services that run for the length of a ``with`` block.

    They start side by side; the block is entered once all are healthy. However it is left, by its
    end, an exception, Ctrl-C or SIGTERM, every process is gone afterwards. SIGTERM ends the block
    with ``SystemExit`` (only when it is entered on the main thread, as Python requires).

    ``on_interrupt`` is called where a signal ends it, before the services are stopped, which takes
    engines some seconds.
    """

    def __init__(
        self,
        services: Sequence[Service],
        *,
        timeout_s: float = 300.0,
        on_progress: Progress | None = None,
        on_interrupt: Callable[[], None] | None = None,
    ) -> None:
        names = [service.name for service in services]
        if len(set(names)) != len(names):
            raise ValueError(f"service names {names} are not unique: give each its own name")
        self.services = list(services)
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._on_interrupt = on_interrupt
        self._previous_handler: signal.Handlers | Callable[..., object] | int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, _exit_on_signal)
        try:
            for service in self.services:
                service.start()
            waiting = list(self.services)
            while waiting:
                waiting = [
                    s for s in waiting if not s.check_healthy(self._timeout_s, self._on_progress)
                ]
                if waiting:
                    time.sleep(POLL_INTERVAL_S)
        except BaseException as error:
            self._stop(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop(error)

    def watch(self) -> None:
        """Block for as long as every service runs. Raises :class:`ServiceError` when one ends, and
        what signals raise."""
        while True:
            for service in self.services:
                service.check_running()
            time.sleep(POLL_INTERVAL_S)

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """A request to a service that fails in the block is a :class:`ServiceError`: of the service
        that has ended, if one has, else of the request."""
        try:
            yield
        except (httpx.HTTPError, TimeoutError) as error:
            # What broke a connection may take a moment to end the whole process.
            deadline = time.monotonic() + ENDING_S
            while time.monotonic() < deadline:
                for service in self.services:
                    if service.pid is not None:
                        service.check_running()
                time.sleep(POLL_INTERVAL_S)
            raise ServiceError(
                f"a request failed: {error or type(error).__name__}; logs are in "
                f"{self.services[0].log_path.parent}"
            ) from error

    def _stop(self, cause: BaseException | None) -> None:
        try:
            if self._on_interrupt and isinstance(cause, KeyboardInterrupt | SystemExit):
                self._on_interrupt()
        finally:
            self._stop_services()

    def _stop_services(self) -> None:
        try:
            stop_all(self.services)
        finally:
            if self._previous_handler is not None:
                signal.signal(signal.SIGTERM, self._previous_handler)
                self._previous_handler = None


def exit_on_sigterm() -> None:
    """From now to the end of this process SIGTERM is ``SystemExit``, and it is ignored once the
    interpreter ends: the exit code is settled then, and the default would replace it by death of
    the signal. Does nothing off the main thread, where Python takes no handler."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit_on_signal)
        # An ignored signal stays so, while Python's own handlers are undone before modules are.
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
