"""The names by which people choose how a store evicts and admits."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from backhaul.protocols.errors import ConfigError
from backhaul.transfer.admission import AdmissionStrategy, AdmitAll, AdmittedBytesBudget
from backhaul.transfer.eviction import EvictionStrategy, LeastRecentlyUsed
from backhaul.transfer.eviction_by_work import Marconi, SavedWorkPerByte


class Eviction(enum.StrEnum):
    """Order of eviction."""

    LRU = "lru"
    SAVED_WORK = "saved_work"
    MARCONI = "marconi"


class Admission(enum.StrEnum):
    """Rule of admission."""

    ALL = "all"
    BUDGET = "budget"


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """How a store evicts and admits. Raises ``ConfigError`` where a number makes no sense.

    Attributes:
        marconi_alpha: weight of saved work against recency, for ``marconi``.
        admit_bytes_per_token: bytes admitted per prompt token looked up, for ``budget``.
        admit_burst_bytes: bytes that may be admitted at once, for ``budget``.
    """

    eviction: Eviction = Eviction.LRU
    marconi_alpha: float = 1.0
    admission: Admission = Admission.ALL
    admit_bytes_per_token: float = 0.0
    admit_burst_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for option, value in (
            ("--marconi-alpha", self.marconi_alpha),
            ("--admit-per-token", self.admit_bytes_per_token),
        ):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{option} is {value}: give a finite number, 0 or more")
        if self.admit_burst_bytes < 1:
            raise ConfigError(f"--admit-burst is {self.admit_burst_bytes}: give 1 byte or more")
        if self.admission is Admission.BUDGET and self.admit_bytes_per_token == 0:
            raise ConfigError(
                "--admit-per-token is 0 with --admission budget: after the first burst nothing "
                "would be admitted; give the bytes per prompt token"
            )

    def make_eviction(self) -> EvictionStrategy:
        """A new strategy."""
        if self.eviction is Eviction.MARCONI:
            return Marconi(self.marconi_alpha)
        if self.eviction is Eviction.SAVED_WORK:
            return SavedWorkPerByte()
        return LeastRecentlyUsed()

    def make_admission(self) -> AdmissionStrategy:
        """A new strategy; it keeps a balance, so each store needs one of its own."""
        if self.admission is Admission.BUDGET:
            return AdmittedBytesBudget(self.admit_bytes_per_token, self.admit_burst_bytes)
        return AdmitAll()


DEFAULT = Strategies()
