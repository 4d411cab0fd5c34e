"""Random histories: conversations on two engines, a failing store, aborts, resets, restarts.

Each history is drawn from its seed, engine shapes included; only the timing of the connector's
threads is not. Invariants are checked after every step and once everything has come to rest.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from harness import ATTENTION, BLOCK, FULL, HYBRID, MIXED, STATE, Finished, Pair, SimEngine, new_uri
from sim_faults import FAULTS, Faults, FaultyStore, Restartable
from sim_record import check_counters, check_record

from backhaul.transfer.registry import open_store

SEEDS = range(16)
_STEPS = 160
_SEEN: Counter[str] = Counter()


@dataclass
class Shape:
    """One history's engines and faults, drawn from a seed."""

    engine: dict[str, Any]
    options: dict[str, Any]
    rates: dict[str, float]
    capacity: str
    longest_prompt: int


def draw_shape(r: random.Random) -> Shape:
    """A small pool in every third history, a small store in every fourth."""
    groups = r.choice([HYBRID, HYBRID, (FULL, STATE), MIXED, ATTENTION])
    tight = r.random() < 0.35
    faulty = r.random() < 0.7
    rates = {name: r.choice([0, 0, 0.1, 0.3]) for name in FAULTS} if faulty else {}
    return Shape(
        engine={
            "groups": groups,
            "asynchronous": r.random() < 0.6,
            "late": r.random() < 0.5,
            "num_blocks": 26 if tight else 128,
            "max_tokens": 96 if tight else 200,
            "max_requests": r.choice([2, 8]),
            "budget": r.choice([16, 24, 64]),
            "policy": r.choice(["fail", "recompute"]),
            "ranks": r.choice([1, 1, 2]),
            "layout": r.choice(["LBHNC", "BLHNC"]),
            "retention": 0 if groups is ATTENTION else r.choice([0, 0, None, 2 * BLOCK]),
        },
        options={
            "policy": r.choice(["both", "both", "decode_end", "input_end", "main_sparse"]),
            "publish_on": r.choice([["stop"], ["stop", "length"], ["stop", "length", "abort"]]),
            "stream_ahead": r.random() < 0.7,
            "max_pinned_fraction": r.choice([0.5, 0.5, 0.1]),
            "lookup_timeout_s": r.choice([0.05, 1.0, 1.0]),
            "publication_wait_s": r.choice([0, 0.01]),
            "load_timeout_s": 1.0,
            "publish_timeout_s": 1.0,
        },
        rates=rates,
        capacity=r.choice(["64MiB", "64MiB", "64MiB", "48KiB"]),
        longest_prompt=60 if tight else 120,
    )


@dataclass
class History:
    """One random run."""

    seed: int
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = r = random.Random(self.seed)
        self.shape = draw_shape(r)
        self.where = Restartable(new_uri(self.shape.capacity))
        self.faults = Faults(dict(self.shape.rates), self.seed, slow_s=0.03)
        self.pair = Pair(self.where.uri)
        self.engines = [self._engine(name) for name in ("one", "two")]
        self.conversations = [self._tokens(r.randrange(1, 5 * BLOCK)) for _ in range(4)]
        self.of_request: dict[str, int] = {}
        self.cut_off: dict[str, tuple[set[str], set[bytes]]] = {}

    def _engine(self, name: str) -> SimEngine:
        return self.pair.engine(
            name=name,
            options=self.shape.options,
            wrap=lambda _: FaultyStore(self.where, self.faults),
            **self.shape.engine,
        )

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(2, 1000) for _ in range(count)]

    def run(self) -> None:
        """The random part, then rest."""
        actions = [
            (0.22, self.turn),
            (0.04, self.abort),
            (0.01, self.restart),
            (0.01, self.reset),
            (1.0, self.advance),
        ]
        for _ in range(_STEPS):
            engine, x = self.random.choice(self.engines), self.random.random()
            for share, action in actions:
                if x < share:
                    action(engine)
                    break
                x -= share
            for one in self.engines:
                self.collect(one)
        self.faults.rates.clear()
        for engine in self.engines:
            engine.drain()
            self.collect(engine)
            self._check_cut_off(engine)
        self.pair.uri = self.where.uri
        self.pair.check_idle()
        for engine in self.engines:
            check_counters(engine)
        self.seen["checkpoints read back"] += self.pair.checkpoints()

    def turn(self, engine: SimEngine) -> None:
        """A conversation goes on, word for word or with its end rewritten."""
        r = self.random
        if len(engine.live) >= 6:
            return
        index = r.randrange(len(self.conversations))
        history = self.conversations[index]
        kept = len(history) if r.random() < 0.75 else r.randrange(1, len(history) + 1)
        prompt = (history[:kept] + self._tokens(r.randrange(1, 12)))[: self.shape.longest_prompt]
        u_end = r.choice([None, r.randrange(1, len(prompt) + 1), min(kept, len(prompt))])
        stops = r.random() < 0.8
        name = engine.submit(prompt, r.randrange(1, 30), stops=stops, u_end=u_end)
        self.of_request[name] = index

    def abort(self, engine: SimEngine) -> None:
        """A client goes away."""
        if engine.live:
            name = self.random.choice(engine.live)
            self.seen[f"abort while {engine.status(name).name}"] += 1
            engine.abort(name)

    def restart(self, engine: SimEngine) -> None:
        """The store begins anew."""
        self.where.restart()
        self.seen["restart"] += 1

    def reset(self, engine: SimEngine) -> None:
        """The operator clears an engine's prefix cache."""
        running = self.random.random() < 0.5
        try:
            engine.scheduler.reset_prefix_cache(
                reset_running_requests=running, reset_connector=self.random.random() < 0.3
            )
        except RuntimeError:
            # vLLM's answer where blocks are still referenced, be it by a load or by a pin.
            assert running
        self.seen["reset"] += 1

        if engine.backhaul._half._cut_off and engine.name not in self.cut_off:
            self.seen["reset of the connector"] += 1
            self.cut_off[engine.name] = set(engine.live), self._published_by(engine)
            for _ in range(3):  # the ranks hear of it: a restarted store does not know
                engine.step()

    def _published_by(self, engine: SimEngine) -> set[bytes]:
        assert engine.config.kv_transfer_config is not None
        name = engine.config.kv_transfer_config.engine_id
        store = open_store(self.where.uri, client_name="look")
        found = store.list_checkpoints(timeout_s=300)
        store.close()
        return {bytes(info.block_hash) for info in found if info.producer == name}

    def _check_cut_off(self, engine: SimEngine) -> None:
        """Of an engine whose connector was reset: what others find is what they found before."""
        if engine.name in self.cut_off:
            assert self._published_by(engine) <= self.cut_off[engine.name][1]

    def advance(self, engine: SimEngine) -> None:
        """A few steps."""
        for _ in range(self.random.randrange(1, 6)):
            engine.step()
            engine.check()

    def collect(self, engine: SimEngine) -> None:
        """Take the ends of requests into their conversations."""
        engine.check()
        for name in list(engine.finished):
            done: Finished = engine.finished.pop(name)
            index = self.of_request.pop(name)
            self.seen[f"end by {done.reason}"] += 1
            self.seen["preemptions"] += engine.requests[name].num_preemptions
            self.seen["loaded tokens"] += done.loaded
            if engine.name in self.cut_off and name not in self.cut_off[engine.name][0]:
                assert done.loaded == 0
            if "backhaul" in done.params:
                for candidate in check_record(engine, done).candidates:
                    self.seen[f"candidate {candidate.reason or candidate.passed_over}"] += 1
            if done.reason != "abort":
                longest = self.shape.longest_prompt - 8
                fits = len(done.history) <= longest
                self.conversations[index] = done.history if fits else self._tokens(BLOCK)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_history(seed: int) -> None:
    history = History(seed)
    try:
        history.run()
    except BaseException:
        print(f"seed {seed}: {history.shape}")
        raise
    finally:
        history.pair.close()
    _SEEN.update(history.seen)
    _SEEN.update(history.faults.happened)
    for engine in history.engines:
        for name, value in engine.counters.items():
            _SEEN[name.partition("|")[0]] += value


def test_the_histories_together_went_everywhere() -> None:
    if not _SEEN["checkpoints read back"]:
        pytest.skip("the histories did not run")
    expected = [
        *("abort while WAITING", "abort while WAITING_FOR_REMOTE_KVS", "abort while RUNNING"),
        *("end by stop", "end by length", "end by abort", "preemptions", "restart", "reset"),
        "reset of the connector",
        *("loaded tokens", "loads", "load_failures", "publications", "publication_failures"),
        *(name for name in FAULTS if not name.startswith("read_")),
        *("candidate hash_mismatch", "candidate load_failed", "candidate uncommitted"),
        *("candidate shallower", "candidate local_hit", "candidate None"),
    ]
    assert not [name for name in expected if not _SEEN[name]], dict(_SEEN)


if __name__ == "__main__":  # more seeds: python test_state_machine.py FIRST LAST
    import sys

    begun = time.monotonic()
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            test_a_random_history(number)
        except Exception as error:
            print(f"FAILED {number}: {type(error).__name__}: {str(error)[:500]}")
    print(f"{time.monotonic() - begun:.0f} s", dict(_SEEN))
