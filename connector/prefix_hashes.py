"""Prefix hashes of a prompt, computed by vLLM's own code, for tools that do not import vLLM.

``python -m backhaul.connector.prefix_hashes`` reads one JSON object on standard input
(``tokens``, ``algorithm``, ``hash_tokens``, and optionally ``cache_salt``) and writes ``hashes``
and ``probe`` in hex. The hashes of requests with LoRA adapters or images contain more and are not
computed here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from backhaul.connector.fingerprints import hash_probe


def prefix_hashes(
    tokens: Sequence[int], algorithm: str, hash_tokens: int, cache_salt: str | None = None
) -> list[bytes]:
    """Chained hashes of every whole block of ``hash_tokens`` tokens."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    request = Request(
        request_id="explain",
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=cache_salt,
        block_hasher=get_request_block_hasher(hash_tokens, function),
    )
    return [bytes(block_hash) for block_hash in request.block_hashes]


def main() -> None:
    """See the module's docstring."""
    asked = json.load(sys.stdin)
    hashes = prefix_hashes(
        asked["tokens"], asked["algorithm"], asked["hash_tokens"], asked.get("cache_salt")
    )
    answer = {"hashes": [one.hex() for one in hashes], "probe": hash_probe(asked["algorithm"])}
    # vLLM may log to standard output: the answer is the last line.
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
