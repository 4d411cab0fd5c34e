"""Whether what this engine publishes has a way to anybody who loads, and saying so when not.

A thread tells the store every few seconds that the engine is there, also while vLLM is idle, and
learns who else is. A decode engine that starts before any prefill engine has no path until one
shows up; that is found by the next turn of the thread, which a withheld publication brings forward.
An engine that loads but only decodes is no way for others' publications.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from backhaul.connector.worker_kind import ObservedKind
from backhaul.protocols.domain import DomainRecord
from backhaul.protocols.errors import StoreError, StoreRejected
from backhaul.protocols.options import NoPath, WorkerKind
from backhaul.transfer.base import Member, Peers, Store

logger = logging.getLogger("vllm.backhaul")

_REFRESH_S = 15.0
"""Between two turns; the store forgets an engine after four of them."""
_GRACE_S = 5.0
"""Before the second turn where the first one found nobody: engines are often started together, so
nothing is said until then."""
_NUDGE_S = 0.5
"""Least time between two turns, however often one is asked for."""
_TIMEOUT_S = 2.0
_LEAVE_TIMEOUT_S = 0.5
"""An engine that shuts down does not wait long to say so; silence has the same effect."""


class PathState(enum.Enum):
    """What is known of the way from this engine's publications to somebody who loads."""

    UNKNOWN = "unknown"
    """Nobody was asked yet, or the store keeps no table: a path is taken for granted."""
    OPEN = "open"
    NO_LOADER = "no_loader"
    UNREACHABLE = "unreachable"
    """The store never answered. One that did once may come back: its faults are counted as such."""
    REFUSED = "refused"


_NOBODY_ASKED = Peers(known=False)


@dataclass(frozen=True)
class Known:
    """What the last turn came to; ``detail`` is the store's own words where it failed."""

    state: PathState = PathState.UNKNOWN
    peers: Peers = _NOBODY_ASKED
    detail: str = ""


def judge(peers: Peers) -> PathState:
    """The state after an answer."""
    if not peers.known:
        return PathState.UNKNOWN
    converting = any(one.converters and not one.field for one in peers.elsewhere)
    return PathState.OPEN if peers.loaders or converting else PathState.NO_LOADER


def has_path(known: Known, *, loads: bool, own_prefill: bool) -> bool:
    """Whether a decode end of one request can reach a prefill.

    Args:
        loads: this engine loads as well.
        own_prefill: it computed the request's prompt itself, so it may get the next turn's.
    """
    if known.state is PathState.NO_LOADER:
        return loads and own_prefill
    return known.state in (PathState.OPEN, PathState.UNKNOWN)


def problem(known: Known, *, domain: str, store: str, no_path: NoPath) -> str:
    """One line that says why there is no path and what follows; "" where there is one."""
    why = _out_of_reach(known, store)
    if known.state is PathState.NO_LOADER:
        others = [one for one in known.peers.elsewhere if one.loaders]
        why = f"no other engine that loads and prefills uses domain {domain} of store {store}"
        if known.peers.decode_loaders:
            why += f" ({known.peers.decode_loaders} that load from there only decode)"
        for one in others[:1]:
            why += f", but {one.loaders} in domain {one.domain}, " + (
                f"where {one.field} is {one.theirs or 'unset'} instead of {one.ours or 'unset'}"
                if one.field
                else "which could convert what this one publishes, if convert_buffer_bytes were "
                "not 0 there"
            )
        if not others:
            why += " yet; prefill engines need kv_role kv_consumer or kv_both and this store"
    if not why:
        return ""
    then = (
        "decode ends are not kept until that changes and counted as no_publication_path"
        if no_path is NoPath.DISABLE
        else "decode ends are published all the same and counted in pathless_publications"
    )
    return f"backhaul: no publication path: {why}; {then}"


def loading_problem(known: Known, *, store: str) -> str:
    """One line that says why this engine can load nothing; "" where it can."""
    why = _out_of_reach(known, store)
    return why and f"backhaul: no publication path to here: {why}; nothing is loaded meanwhile"


def published_elsewhere(peers: Peers, *, converts: bool) -> str:
    """One line where engines publish, and none of them what this one can load; "" otherwise.

    Args:
        converts: this engine converts what it can.
    """
    others = [one for one in peers.elsewhere if one.publishers]
    if not (peers.known and others) or peers.publishers:
        return ""
    if converts and any(not one.field for one in others):
        return ""
    one = others[0]
    which = (
        f"where {one.field} is {one.theirs or 'unset'} instead of {one.ours or 'unset'}"
        if one.field
        else "which could be converted here, if convert_buffer_bytes were not 0"
    )
    return (
        "backhaul: no publication path to here: of the engines that publish none uses this "
        f"engine's cache domain; {one.publishers} use domain {one.domain}, {which}"
    )


def _out_of_reach(known: Known, store: str) -> str:
    if known.state is PathState.UNREACHABLE:
        return f"store {store} cannot be reached ({known.detail}); check option 'store'"
    if known.state is PathState.REFUSED:
        return f"store {store} refuses this engine ({known.detail})"
    return ""


class Presence:
    """Keeps an engine in the store's table. ``has_path`` and ``nudge`` return at once."""

    def __init__(
        self,
        store: Store,
        record: DomainRecord,
        member: Member,
        *,
        address: str,
        no_path: NoPath,
        wants_path: bool,
        kind: WorkerKind | None = None,
        refresh_s: float = _REFRESH_S,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        """
        Args:
            address: the store's, for people.
            wants_path: the engine publishes decode ends.
            kind: what it serves; None: what ``saw_request`` shows.
        """
        self._store = store
        self._record = record
        self._member = member._replace(decodes_only=kind is WorkerKind.DECODE)
        self._observed = ObservedKind() if kind is None else None
        self._address = address
        self._no_path = no_path
        self._wants_path = wants_path
        self._refresh_s = refresh_s
        self._say = say
        self._known = Known()
        self._missed = False  # a publication was withheld or found nobody
        self._turns_alone = 0
        self._said: set[PathState] = set()
        self._turns_elsewhere = 0  # in which others published elsewhere only
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backhaul-presence", daemon=True)
        self._thread.start()

    def has_path(self, *, own_prefill: bool) -> bool:
        """See the function of that name."""
        return has_path(self._known, loads=self._member.loads, own_prefill=own_prefill)

    def saw_request(self, *, handed_over: bool) -> None:
        """A request came, its prompt computed by another engine or to be computed here."""
        if self._observed is None:
            return
        decodes_only = self._observed.saw(handed_over=handed_over)
        if decodes_only != self._member.decodes_only:
            self._member = self._member._replace(decodes_only=decodes_only)
            self._wake.set()

    def stop_converting(self) -> None:
        """This engine turned out to be unable to convert: others need not count on it."""
        self._member = self._member._replace(converts=False)
        self._wake.set()

    def missed(self) -> None:
        """A decode end had no path: ask again soon."""
        self._missed = True
        self._wake.set()

    def leave(self) -> None:
        """The engine neither loads nor publishes any more; returns at once."""
        self._wants_path = False
        self._observed = None
        self._member = Member(self._member.name, loads=False, publishes=False)
        self._wake.set()

    def close(self) -> None:
        """Leave the table, if the store lets us. Waits a second at most; safe to call twice."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout=2 * _LEAVE_TIMEOUT_S)

    # -- on the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._turn()
            first = 1 in (self._turns_alone, self._turns_elsewhere)
            self._wake.wait(min(_GRACE_S, self._refresh_s) if first else self._refresh_s)
            if self._wake.is_set():
                self._closing.wait(_NUDGE_S)
            self._wake.clear()
        try:
            gone = Member(self._member.name, loads=False, publishes=False)
            self._store.join(self._record, gone, timeout_s=_LEAVE_TIMEOUT_S)
        except Exception as error:
            logger.debug("backhaul: leaving the store: %s", error)

    def _turn(self) -> None:
        try:
            peers = self._store.join(self._record, self._member, timeout_s=_TIMEOUT_S)
        except StoreRejected as error:
            self._known = Known(PathState.REFUSED, detail=str(error))
        except StoreError as error:
            if self._known.state in (PathState.UNKNOWN, PathState.UNREACHABLE):
                self._known = Known(PathState.UNREACHABLE, detail=str(error))
        except Exception:
            logger.exception("backhaul: unexpected error while joining the store")
        else:
            self._known = Known(judge(peers), peers)
        alone = self._known.state is PathState.NO_LOADER
        self._turns_alone = self._turns_alone + 1 if alone else 0
        self._speak()

    def _speak(self) -> None:
        """Each state once; a path that was found ends the matter and lets it be said again."""
        known = self._known
        found = line = ""
        if self._wants_path:
            if known.state is PathState.OPEN:
                found = "publication path found: other engines that load from domain "
                found += f"{self._record.domain_id}: {known.peers.loaders}"
            elif known.state is not PathState.NO_LOADER or self._is_sure(known.peers):
                line = problem(
                    known,
                    domain=self._record.domain_id,
                    store=self._address,
                    no_path=self._no_path,
                )
        elif self._member.loads:  # and so needs the store, but nobody else
            if known.state in (PathState.OPEN, PathState.NO_LOADER):
                found = f"store {self._address} is reached, checkpoints are loaded"
            line = loading_problem(known, store=self._address)
        if found:
            self._missed = False
            if self._said:
                self._say(f"backhaul: {found}")
                self._said.clear()
        elif line and known.state not in self._said:
            self._said.add(known.state)
            self._say(line)
        self._speak_of_publishers(known.peers)

    def _speak_of_publishers(self, peers: Peers) -> None:
        """Once, in the second turn in a row; not where the line about loaders names the field."""
        line = published_elsewhere(peers, converts=self._member.converts)
        loads = self._member.loads and not self._member.decodes_only
        named = self._wants_path and any(one.loaders for one in peers.elsewhere)
        self._turns_elsewhere = self._turns_elsewhere + 1 if line and loads and not named else 0
        if self._turns_elsewhere == 2:
            self._say(line)

    def _is_sure(self, peers: Peers) -> bool:
        """An engine that loads as well may be alone and its own prefill: it has no path only where
        it is known to decode only, a request showed it, or those who load are seen to be elsewhere.
        """
        if self._missed or any(one.loaders for one in peers.elsewhere):
            return True
        its_own = self._member.loads and not self._member.decodes_only
        return not its_own and self._turns_alone > 1
