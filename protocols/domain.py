"""The cache domain: everything that decides whether one worker's bytes fit another.

The record is canonical JSON (sorted keys, no spaces); its SHA-256 gives the short id under which
objects are stored. Every field is kept, so that a mismatch can be named. Two workers exchange
bytes only inside one id.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from backhaul.protocols.checkpoint import DomainId
from backhaul.protocols.errors import StoreRejected
from backhaul.protocols.layout import CacheLayout

DOMAIN_VERSION = 1
"""Version of the record's meaning. 1: first version."""


class DomainRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for a byte to be shared.

    Attributes:
        version: ``DOMAIN_VERSION`` of the writer.
        model: digest of the model's configuration.
        weights: digest that tells two sets of weights with one configuration apart.
        revision: revision of the weights, where one was named.
        quantization: quantisation method, or "".
        layout: groups, block sizes, hash unit, ranks.
        hash_function: name of the prefix hash.
        hash_probe: hex of that function's chained hash over a fixed token sequence: differs where
            seeds or serialisation do.
        kv_dtype: element type of attention KV.
        state_dtypes: element types of the recurrent states, in the order of the state's parts.
        conv_layout: order of the convolution state's dimensions (vLLM: SD or DS), or "".
        kv_layout: order of an attention page's dimensions.
        attention_backend: name of the kernel family whose page interior this is.
        platform: device family, with the CPU's instruction set where it decides the interior.
        tensor_parallel, pipeline_parallel: sharding of every object.
        speculative_tokens: draft tokens; they change the recurrent page.
        vllm: major and minor version of vLLM, whose layouts may change between versions.
    """

    version: int = DOMAIN_VERSION
    model: str
    weights: str
    revision: str = ""
    quantization: str = ""
    layout: CacheLayout
    hash_function: str
    hash_probe: str
    kv_dtype: str
    state_dtypes: tuple[str, ...] = ()
    conv_layout: str = ""
    kv_layout: str = ""
    attention_backend: str = ""
    platform: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    speculative_tokens: int = 0
    vllm: str

    def canonical(self) -> bytes:
        """The record as canonical JSON."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def domain_id(self) -> DomainId:
        """The first 16 hex digits of the SHA-256 of the canonical record."""
        return DomainId(hashlib.sha256(self.canonical()).hexdigest()[:16])


def parse_domain(record: bytes) -> DomainRecord:
    """Read a canonical record. Raises ``StoreRejected`` where it is not one of this version."""
    try:
        domain = msgspec.json.decode(record, type=DomainRecord)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise StoreRejected(f"malformed domain record: {error}") from None
    except Exception as error:  # layout checks raise UnsupportedError
        raise StoreRejected(f"domain record with an impossible layout: {error}") from None
    if domain.version != DOMAIN_VERSION:
        raise StoreRejected(
            f"domain record of version {domain.version}, this side speaks {DOMAIN_VERSION}"
        )
    return domain


def differing_fields(a: DomainRecord, b: DomainRecord) -> dict[str, tuple[Any, Any]]:
    """Field name -> (value in a, value in b) of every field that differs; empty when equal."""
    return {
        name: (getattr(a, name), getattr(b, name))
        for name in DomainRecord.__struct_fields__
        if getattr(a, name) != getattr(b, name)
    }
