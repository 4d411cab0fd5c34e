"""Mooncake's request traces: arrival, lengths and chained block hashes, no conversations.

Format: github.com/kvcache-ai/Mooncake, FAST25-release. A line has ``timestamp`` (ms),
``input_length``, ``output_length`` and ``hash_ids``, one per block of 512 prompt tokens, the last
one's block partly filled.

What the trace leaves out is inferred from the ids alone:

- A request *continues* an earlier one if its prompt holds all of the earlier one's full blocks, at
  least one, and is longer. Of several it continues the one with most full blocks, and of those the
  latest. A prefix that more than ``CONTINUATIONS_MAX`` different blocks follow is a shared head (a
  system prompt), and an end there continues nothing: in the conversation trace the block that opens
  most prompts has 7,373 successors and no other prefix more than 11.
- Requests continued by a chain form one conversation; a second continuation of one request starts
  a conversation of its own.
- What a request generated are the tokens that follow its prompt in the earliest continuation long
  enough to hold all of it: the reply is taken to be replayed token for token, so that D_end can be
  reached. Without such a continuation it is content that nobody has.
- The partly filled block at a prompt's end is the beginning of the continuation's full block there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from backhaul.benchmarks.reuse.trace import Span, Turn, merged
from backhaul.benchmarks.traces.faults import LineFault, Reason, Skips
from backhaul.benchmarks.traces.records import decode, read_lines

BLOCK_TOKENS = 512

CONTINUATIONS_MAX = 16

_Tokens = Annotated[int, Meta(ge=0, le=1 << 31)]
_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0, le=1e15)]
    input_length: Annotated[int, Meta(ge=1, le=1 << 31)]
    output_length: _Tokens
    hash_ids: list[_Id]


_DECODER = msgspec.json.Decoder(_Line)


class _Request(NamedTuple):
    """One line. ``path``: nodes of the prefix tree, one per block, the first block's first."""

    line: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    path: array[int]

    @property
    def full_blocks(self) -> int:
        return self.prompt_tokens // BLOCK_TOKENS


class _PrefixTree:
    """Prefixes of blocks, numbered from 1 in the order of their first use; 0 is the empty one.

    Ids are chained hashes, but nothing makes a file keep to that: a block is named by the whole
    path to it, so that equal names always mean equal prefixes.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self.continuations = array("q", [0])

    def walk(self, hash_ids: list[int]) -> array[int]:
        path = array("q")
        node = 0
        for hash_id in hash_ids:
            child = self._nodes.get((node, hash_id))
            if child is None:
                child = len(self.continuations)
                self._nodes[(node, hash_id)] = child
                self.continuations.append(0)
                self.continuations[node] += 1
            path.append(child)
            node = child
        return path


def read_mooncake(path: Path, skips: Skips) -> Iterator[Turn]:
    """Turns in the file's order. The file is read whole before the first one, as what a request
    generated is found in later lines; kept are 8 bytes per block of each prompt and the tree."""
    tree = _PrefixTree()
    requests = list(_requests(path, skips, tree))
    parents = _parents(requests, tree)
    outputs = _outputs(requests, parents)
    names = _names(requests, parents, outputs)
    conversations: dict[int, str] = {}
    continued: set[int] = set()
    for i, request in enumerate(requests):
        parent = parents[i]
        if parent is not None and parent not in continued:
            continued.add(parent)
            conversations[i] = conversations[parent]
        else:
            conversations[i] = f"c{request.line}"
        yield Turn(
            request=f"r{request.line}",
            conversation=conversations[i],
            arrival_s=request.arrival_s,
            after="" if parent is None else f"r{requests[parent].line}",
            prompt=_content(names, request.path, 0, request.prompt_tokens),
            output=_output(requests, names, outputs, i),
        )


def _requests(path: Path, skips: Skips, tree: _PrefixTree) -> Iterator[_Request]:
    for record in read_lines(path, skips):
        try:
            line = decode(_DECODER, record)
            blocks = -(-line.input_length // BLOCK_TOKENS)
            if len(line.hash_ids) != blocks:
                problem = (
                    f"an input of {line.input_length} tokens has {blocks} blocks of {BLOCK_TOKENS}"
                )
                raise LineFault(Reason.INCONSISTENT, "hash_ids", line.hash_ids, problem)
        except LineFault as fault:
            skips.take(record.line, fault)
            continue
        yield _Request(
            line=record.line,
            arrival_s=line.timestamp / 1000,
            prompt_tokens=line.input_length,
            output_tokens=line.output_length,
            path=tree.walk(line.hash_ids),
        )


def _parents(requests: list[_Request], tree: _PrefixTree) -> list[int | None]:
    """For each request the earlier one that it continues."""
    ends: dict[int, int] = {}  # node of the last full block -> latest request that ends there
    parents: list[int | None] = []
    for i, request in enumerate(requests):
        parent = None
        for node in reversed(request.path[: request.full_blocks]):
            end = ends.get(node)
            if (
                end is not None
                and tree.continuations[node] <= CONTINUATIONS_MAX
                and requests[end].prompt_tokens < request.prompt_tokens
            ):
                parent = end
                break
        parents.append(parent)
        if request.full_blocks:
            ends[request.path[request.full_blocks - 1]] = i
    return parents


def _outputs(requests: list[_Request], parents: list[int | None]) -> dict[int, int]:
    """Request -> its earliest continuation that holds all of its output."""
    outputs: dict[int, int] = {}
    for i, parent in enumerate(parents):
        if parent is None or parent in outputs:
            continue
        before = requests[parent]
        if requests[i].prompt_tokens >= before.prompt_tokens + before.output_tokens:
            outputs[parent] = i
    return outputs


def _names(
    requests: list[_Request], parents: list[int | None], outputs: dict[int, int]
) -> dict[int, int]:
    """Node of a partly filled block -> node of the same place in the prompt of the continuation
    that holds the output, or of the first one: it begins with the same tokens. Nodes lead to later
    ones only, so no chain of them is a circle."""
    names: dict[int, int] = {}
    for i, parent in enumerate(parents):
        if parent is None or outputs.get(parent, i) != i:
            continue
        before = requests[parent]
        if before.prompt_tokens % BLOCK_TOKENS:
            partial, same_place = before.path[-1], requests[i].path[before.full_blocks]
            if partial < same_place:
                names.setdefault(partial, same_place)
    return names


def _output(
    requests: list[_Request], names: dict[int, int], outputs: dict[int, int], i: int
) -> tuple[Span, ...]:
    request = requests[i]
    if i not in outputs:
        return merged([Span(f"output {request.line}", 0, request.output_tokens)])
    start = request.prompt_tokens
    return _content(names, requests[outputs[i]].path, start, start + request.output_tokens)


def _content(names: dict[int, int], path: array[int], start: int, stop: int) -> tuple[Span, ...]:
    """Tokens ``[start, stop)`` of a prompt."""
    spans = []
    for k in range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)):
        node = path[k]
        while node in names:
            node = names[node]
        first = k * BLOCK_TOKENS
        spans.append(Span(f"block {node}", max(start - first, 0), min(stop - first, BLOCK_TOKENS)))
    return tuple(spans)
