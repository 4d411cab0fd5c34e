"""How many bytes a store takes in: everything, or so many per token of traffic.

A pool of limited size makes endpoints compete for space; a budget on what is *admitted* gives every
policy the same bytes per unit of traffic, which tells the use of a second endpoint from the memory
that it costs.
"""

from __future__ import annotations

from typing import Protocol


class AdmissionStrategy(Protocol):
    """Exchangeable rule of admission. Sans-I/O, no clock; not thread-safe."""

    def credit(self, prompt_tokens: int) -> None:
        """Traffic: a lookup for a prompt of so many tokens, in whole boundaries."""
        ...

    def admits(self, nbytes: int) -> bool:
        """Whether a publication may begin with so many new bytes. Changes nothing."""
        ...

    def charge(self, nbytes: int) -> None:
        """So many new bytes were given to a publication."""
        ...

    def refund(self, nbytes: int) -> None:
        """So many of them were never committed."""
        ...


class AdmitAll:
    """Takes whatever there is room for."""

    def credit(self, prompt_tokens: int) -> None:
        """See ``AdmissionStrategy``."""

    def admits(self, nbytes: int) -> bool:
        """See ``AdmissionStrategy``."""
        return True

    def charge(self, nbytes: int) -> None:
        """See ``AdmissionStrategy``."""

    def refund(self, nbytes: int) -> None:
        """See ``AdmissionStrategy``."""


class AdmittedBytesBudget:
    """A token bucket of bytes, filled by traffic.

    A publication that was let in may finish: its later pieces (other ranks, the state after
    streamed attention) are charged without being asked about and may put the balance below zero,
    where it has to be earned back before the next one is let in. One that is larger than the whole
    bucket gets in when the bucket is full. So at any time::

        admitted <= burst + rate * prompt tokens + debt

    Attributes:
        balance: bytes that may be admitted now; negative: debt.
    """

    def __init__(self, bytes_per_prompt_token: float, burst_bytes: float) -> None:
        """Args:
        bytes_per_prompt_token: the rate.
        burst_bytes: the bucket's size; it starts full.
        """
        self.bytes_per_prompt_token = bytes_per_prompt_token
        self.burst_bytes = burst_bytes
        self.balance = burst_bytes

    def credit(self, prompt_tokens: int) -> None:
        """See ``AdmissionStrategy``."""
        self._add(prompt_tokens * self.bytes_per_prompt_token)

    def admits(self, nbytes: int) -> bool:
        """See ``AdmissionStrategy``."""
        return self.balance >= min(nbytes, self.burst_bytes)

    def charge(self, nbytes: int) -> None:
        """See ``AdmissionStrategy``."""
        self.balance -= nbytes

    def refund(self, nbytes: int) -> None:
        """See ``AdmissionStrategy``."""
        self._add(nbytes)

    def _add(self, nbytes: float) -> None:
        self.balance = min(self.balance + nbytes, self.burst_bytes)
