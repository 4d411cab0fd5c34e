"""What the proxy costs, against the same calls made straight to the same engines.

The engines are fakes that answer at once, so that what is measured is the way there and back.
Variants are interleaved and medians taken; a difference is the median of paired differences, with
its 10th and 90th percentile. Measured per length of the prompt, in token ids:

- ``request``: a chat request that is not streamed, until its answer is there. ``direct`` asks the
  decode engine alone, ``two legs`` makes both legs from the client, ``decode only`` is the proxy
  where nothing is handed over, ``proxy`` is the proxy with both legs.
- ``first event``, ``per token``: a stream, until its first event, and per further event at full
  speed, which is processor time and not latency of a paced stream.

The proxy and each engine are processes of their own; the client is this one.

    python -m backhaul.benchmarks.proxy --output proxy.json
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table

from backhaul.deploy.console import Console
from backhaul.deploy.processes import Cluster, Service, free_port
from backhaul.deploy.up import ProxyService
from backhaul.proxy.legs import Endpoint, decode_body, prefill_body, read_prefill

PATH = Endpoint.CHAT.path
WARM_UP = 10

console = Console()


@dataclass(frozen=True)
class Difference:
    """One variant against another. Milliseconds; microseconds where the measure is per token."""

    measure: str
    prompt_tokens: int
    variant: str
    against: str
    median: float
    baseline: float
    added: float
    added_p10: float
    added_p90: float
    repeats: int


class FakeEngineService(Service):
    """One fake engine in a process of its own."""

    def __init__(self, name: str, log_dir: Path) -> None:
        super().__init__(name, log_dir)
        self._port = free_port()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def health_url(self) -> str:
        return f"{self.url}/health"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "backhaul.proxy.fake_engine", str(self._port)]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


class Bench:
    """A client of the proxy and of both engines."""

    def __init__(self, prefill: str, decode: str, proxy: str) -> None:
        self._http = httpx.Client(timeout=60.0, trust_env=False)
        self._prefill, self._decode, self._proxy = (u + PATH for u in (prefill, decode, proxy))

    def _ask(self, url: str, body: dict[str, Any]) -> Any:
        response = self._http.post(url, json=body)
        response.raise_for_status()
        return response.json()

    def direct(self, body: dict[str, Any]) -> None:
        """The decode engine alone."""
        self._ask(self._decode, body)

    def two_legs(self, body: dict[str, Any]) -> None:
        """Both legs, made by the client."""
        answer = self._ask(self._prefill, prefill_body(Endpoint.CHAT, body))
        prefill = read_prefill(Endpoint.CHAT, answer)
        self._ask(self._decode, decode_body(Endpoint.CHAT, body, prefill))

    def decode_only(self, body: dict[str, Any]) -> None:
        """The proxy, asked for something that cannot be handed over."""
        self._ask(self._proxy, body | {"prompt_logprobs": 0})

    def proxy(self, body: dict[str, Any]) -> None:
        """The proxy with both legs."""
        self._ask(self._proxy, body)

    def stream(self, url: str, body: dict[str, Any], events: int) -> tuple[float, float]:
        """Seconds to the first event, and per further event."""
        started = time.perf_counter()
        first, seen = 0.0, 0
        with self._http.stream("POST", url, json=body | {"stream": True}) as response:
            for chunk in response.iter_raw():
                first = first or time.perf_counter() - started
                seen += chunk.count(b"\n\n")
        total = time.perf_counter() - started
        if seen < events:
            raise RuntimeError(f"a stream from {url} has {seen} events, not {events}")
        return first, (total - first) / (seen - 1)

    def streamed_direct(self, body: dict[str, Any], events: int) -> tuple[float, float]:
        """From the decode engine."""
        return self.stream(self._decode, body, events)

    def streamed_proxy(self, body: dict[str, Any], events: int) -> tuple[float, float]:
        """Through the proxy, with both legs."""
        return self.stream(self._proxy, body, events)


def chat(prompt_tokens: int, reply_tokens: int) -> dict[str, Any]:
    """A request; the fakes count a token per character."""
    text = "lorem ipsum " * (prompt_tokens // 12 + 1)
    messages = [{"role": "user", "content": text[:prompt_tokens]}]
    return {"model": "fake", "messages": messages, "max_tokens": reply_tokens}


def timed(call: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def difference(
    measure: str,
    prompt_tokens: int,
    names: tuple[str, str],
    samples: Sequence[float],
    baseline: Sequence[float],
    factor: float,
) -> Difference:
    """Paired: sample i against baseline i."""
    added = [(a - b) * factor for a, b in zip(samples, baseline, strict=True)]
    deciles = statistics.quantiles(added, n=10)
    return Difference(
        measure,
        prompt_tokens,
        *names,
        median=statistics.median(samples) * factor,
        baseline=statistics.median(baseline) * factor,
        added=statistics.median(added),
        added_p10=deciles[0],
        added_p90=deciles[-1],
        repeats=len(added),
    )


def measure_requests(bench: Bench, prompt_tokens: int, repeats: int) -> list[Difference]:
    """Whole answers."""
    body = chat(prompt_tokens, 16)
    variants: dict[str, Callable[[dict[str, Any]], None]] = {
        "direct": bench.direct,
        "two legs": bench.two_legs,
        "decode only": bench.decode_only,
        "proxy": bench.proxy,
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(repeats + WARM_UP):
        for name, call in variants.items():
            elapsed = timed(lambda call=call: call(body))  # type: ignore[misc]
            if i >= WARM_UP:
                seconds[name].append(elapsed)
    pairs = (("decode only", "direct"), ("proxy", "direct"), ("proxy", "two legs"))
    return [
        difference("request ms", prompt_tokens, pair, seconds[pair[0]], seconds[pair[1]], 1e3)
        for pair in pairs
    ]


def measure_streams(
    bench: Bench, prompt_tokens: int, reply_tokens: int, repeats: int
) -> list[Difference]:
    """Streams at full speed."""
    body = chat(prompt_tokens, reply_tokens)
    direct, proxy = [], []
    for i in range(repeats + WARM_UP):
        samples = (
            bench.streamed_direct(body, reply_tokens),
            bench.streamed_proxy(body, reply_tokens),
        )
        if i >= WARM_UP:
            direct.append(samples[0])
            proxy.append(samples[1])
    names = ("proxy", "direct")
    measures = (("first event ms", 0, 1e3), ("per token us", 1, 1e6))
    return [
        difference(
            name, prompt_tokens, names, [s[i] for s in proxy], [s[i] for s in direct], factor
        )
        for name, i, factor in measures
    ]


def table(results: Sequence[Difference]) -> Table:
    """One row per difference."""
    shown = Table(title="Proxy: what it adds", title_justify="left")
    for name in ("measure", "prompt tokens", "variant", "against"):
        shown.add_column(name)
    for name in ("median", "baseline", "added", "added p10", "added p90"):
        shown.add_column(name, justify="right")
    for r in results:
        numbers = (r.median, r.baseline, r.added, r.added_p10, r.added_p90)
        texts = (r.measure, f"{r.prompt_tokens:,}", r.variant, r.against)
        shown.add_row(*texts, *(f"{number:.2f}" for number in numbers))
    return shown


def main(
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Prompt length; repeat for more.")
    ] = None,
    reply_tokens: Annotated[int, typer.Option(metavar="N", help="Events per stream.")] = 500,
    repeats: Annotated[int, typer.Option(metavar="N", help="Pairs per measure.")] = 100,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the figures as JSON.")
    ] = None,
) -> None:
    """Measure what the proxy adds to a call."""
    lengths = prompt_tokens or [1_000, 32_000]
    results: list[Difference] = []
    with tempfile.TemporaryDirectory(prefix="backhaul-proxy-") as directory:
        logs = Path(directory)
        prefill, decode = (FakeEngineService(name, logs) for name in ("prefill", "decode"))
        proxy = ProxyService(logs, prefill=[prefill.url], decode=[decode.url])
        with Cluster([prefill, decode, proxy], timeout_s=60.0):
            bench = Bench(prefill.url, decode.url, proxy.url)
            for length in lengths:
                results += measure_requests(bench, length, repeats)
                results += measure_streams(bench, length, reply_tokens, max(repeats // 4, 2))
    console.print(table(results))
    if output is not None:
        settings = {
            "machine": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "prompt_tokens": lengths,
            "reply_tokens": reply_tokens,
            "repeats": repeats,
        }
        data = {"settings": settings, "results": [asdict(result) for result in results]}
        output.write_text(json.dumps(data, indent=2) + "\n")
        console.print(f"Wrote {output}")


if __name__ == "__main__":
    typer.run(main)
