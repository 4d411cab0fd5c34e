"""What runs out is met once, in time, and costs one place in the queue."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul.transfer.deadlines import Deadlines


@dataclass(eq=False)
class Owner:
    expires_at: float
    ended: bool = False


MOVES = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["move", "end", "time"]), st.integers(0, 30)),
    max_size=60,
)


@given(MOVES)
def test_each_is_met_once_and_when_its_time_has_come(
    moves: list[tuple[int, str, int]],
) -> None:
    deadlines: Deadlines[Owner] = Deadlines()
    living: dict[int, Owner] = {}
    now = 0.0
    for name, what, value in moves:
        owner = living.get(name)
        if what == "time":
            now += value
        elif owner is None:
            owner = living[name] = Owner(now + value)
            deadlines.push(owner)
        elif what == "end":
            living.pop(name).ended = True
        else:
            earlier = now + value < owner.expires_at
            owner.expires_at = now + value
            if earlier:
                deadlines.push(owner)
        met = []
        for one in deadlines.due(now):
            assert not one.ended and one.expires_at <= now
            one.ended = True
            met.append(one)
        expected = [one for one in living.values() if one.expires_at <= now]
        assert sorted(met, key=id) == sorted(expected, key=id)
        living = {name: one for name, one in living.items() if not one.ended}


@pytest.mark.parametrize("ends", [[50.0, 5.0], [100.0 - i / 1000 for i in range(20_000)]])
def test_one_that_is_moved_to_and_fro_costs_one_place(ends: list[float]) -> None:
    """A client may renew a lease as it likes."""
    deadlines: Deadlines[Owner] = Deadlines()
    owner = Owner(1000.0)
    deadlines.push(owner)
    for i in range(20_000):
        end = ends[i % len(ends)]
        earlier = end < owner.expires_at
        owner.expires_at = end
        if earlier:
            deadlines.push(owner)
    assert len(deadlines) <= 1024
    owner.expires_at = 200.0
    assert list(deadlines.due(150.0)) == []
    assert len(deadlines) <= 2
    assert list(deadlines.due(200.0)) == [owner]
    assert list(deadlines.due(2000.0)) == []
    assert len(deadlines) == 0
