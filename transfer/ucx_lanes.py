"""By which transports a live UCX endpoint of this process reads and writes remote memory.

NIXL does not say, and hands out none of UCX's handles. UCX keeps a tree of its live objects (for
its FUSE view), in which an agent's context has the agent's name and an endpoint its address; and
``ucp_ep_print_info`` prints an endpoint's lanes with what each is for:

    lane[1]:  5:cma/memory.0 md[4]  -> md[4]/cma/sysdev[255] seg 4294967295 rma_bw#0

The tree locks itself. The other function reads the endpoint that it is given, so whoever calls
``lanes`` sees to it that the endpoint outlives the call.

Only the releases of UCX in ``SEEN`` are asked, of which the above was seen to hold. Another one, or
another form of its text, gives an empty answer: this is for people, and nothing depends on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

SEEN = ((1, 23),)
"""Major and minor versions; 1.23 comes with NIXL 1.5.1."""
NAME_MAX = 31
"""Characters of a context's name that UCX keeps (UCP_ENTITY_NAME_MAX without its end)."""

_MAPPED = re.compile(r"(/\S*/lib(ucs|ucp)[-.][^/\s]*)$")
_LANE = re.compile(r"lane\[\d+\]: *\d+:([a-z0-9_]+/[\w.:@-]+?)\.\d+ .*->.*sysdev\[\d+\](.*)")
_OK = 0
_FAULTS = (OSError, AttributeError, ValueError, ctypes.ArgumentError)
"""A library or a function that is not there, or text of another form."""


class _Ucx(NamedTuple):
    """One copy of UCX in this process."""

    ucs: ctypes.CDLL
    ucp: ctypes.CDLL


def endpoints(agent: str) -> frozenset[int]:
    """Addresses of the live endpoints of a NIXL agent, those to itself included."""
    with contextlib.suppress(*_FAULTS):
        return frozenset(address for _, address in _endpoints(agent))
    return frozenset()


def lanes(agent: str, endpoint: int) -> tuple[str, ...]:
    """Transport and device, e.g. ``cma/memory`` or ``rc_mlx5/mlx5_0:1``, of every lane over which
    the endpoint of the agent reads and writes. It must not be freed meanwhile."""
    with contextlib.suppress(*_FAULTS):
        for ucx, address in _endpoints(agent):
            if address == endpoint:
                print_info = functools.partial(ucx.ucp.ucp_ep_print_info, ctypes.c_void_p(address))
                return parse_lanes(_printed(print_info))
    return ()


def parse_lanes(text: str) -> tuple[str, ...]:
    """Lanes for remote memory in the text of ``ucp_ep_print_info``, each once; those for messages
    where there are no others, for then messages carry all."""
    found = [
        (match[1], match[2].split()) for match in map(_LANE.search, text.splitlines()) if match
    ]
    direct = [name for name, uses in found if any(use.startswith("rma") for use in uses)]
    return tuple(dict.fromkeys(direct or [name for name, uses in found if "am" in uses]))


def _endpoints(agent: str) -> Iterator[tuple[_Ucx, int]]:
    for ucx in _copies():
        workers = f"/ucp/context/{agent[:NAME_MAX]}/worker"
        # UCX makes the endpoints' nodes when their worker's is listed.
        worker = f"{workers}/{_list(ucx, workers)}"
        _list(ucx, worker)
        for digits in _list(ucx, f"{worker}/ep").split("0x")[1:]:
            if _list(ucx, f"{worker}/ep/0x{digits}"):  # what was cut apart there is a name
                yield ucx, int(digits, 16)


def _list(ucx: _Ucx, path: str) -> str:
    """Names in a directory of UCX's tree, without anything between them; "" where there is none.

    UCX holds a lock over the tree while it calls back for each name. Python code would then wait
    for the interpreter's own lock, which another thread may hold that waits for UCX's: so C's
    ``fputs(name, file)`` is what is called back."""
    add = ctypes.cast(_libc().fputs, ctypes.c_void_p)
    status = []

    def listed(file: ctypes.c_void_p) -> None:
        status.append(ucx.ucs.ucs_vfs_path_list_dir(path.encode(), add, file))

    names = _printed(listed)
    return names if status == [_OK] else ""


def _printed(write: Callable[[ctypes.c_void_p], Any]) -> str:
    """What a function writes to the C stream that it is given."""
    libc = _libc()
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    file = libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
    if not file:
        raise OSError("no memory for a stream")
    try:
        write(ctypes.c_void_p(file))
    finally:
        libc.fclose(ctypes.c_void_p(file))
    try:
        return ctypes.string_at(text.value or 0, size.value).decode(errors="replace")
    finally:
        libc.free(text)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    libc.free.restype = libc.fclose.restype = None
    return libc


def _copies() -> list[_Ucx]:
    """The copies of UCX that are mapped into this process: NIXL's own, and maybe others'."""
    found: dict[str, dict[str, str]] = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            if match := _MAPPED.search(line.rstrip()):
                path, library = match[1], match[2]
                found.setdefault(os.path.dirname(path), {})[library] = path
    copies = [
        _Ucx(_mapped(one["ucs"]), _mapped(one["ucp"])) for one in found.values() if len(one) == 2
    ]
    return [one for one in copies if _version(one.ucp) in SEEN]


def _version(ucp: ctypes.CDLL) -> tuple[int, int]:
    major, minor, release = (ctypes.c_uint() for _ in range(3))
    ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    return major.value, minor.value


def _mapped(path: str) -> ctypes.CDLL:
    """A library that is mapped already; never a second copy of it."""
    return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
