"""The cache domain: everything that decides whether one worker's bytes fit another.

The record is canonical JSON (sorted keys, no spaces); its SHA-256 gives the short id under which
objects are stored. Every field is kept, so that a mismatch can be named (see ``comparison``). Two
workers exchange bytes only inside one id, or by one of the conversions there.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from backhaul.protocols.checkpoint import DomainId
from backhaul.protocols.errors import StoreRejected, UnsupportedError
from backhaul.protocols.layout import CacheLayout, Name, Text, Tokens

DOMAIN_VERSION = 5
"""Version of the record's meaning.

1: first version.
2: compute type, drafting model, CPU instruction set and scheduler block as fields of their own;
   groups name their layers, their page's interior, whether they belong to the draft and how many
   ranks hold them alike.
3: layers per pipeline stage; groups say how their pages are cut over ranks.
4: groups number their layers.
5: what the engine's greatest length decides; the draft's quantisation; a backend is never "auto".
"""

RECORD_BYTES_MAX = 128 << 10
"""Of a canonical record: ``GROUPS_MAX`` groups of a kilobyte each. A store answers with the records
of all its domains at once."""

_STAGES_MAX = 4096
_DTYPES_MAX = 256
_ERROR_CHARACTERS = 300
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=_STAGES_MAX)]


class DomainRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be equal for a byte to be shared.

    Attributes:
        version: ``DOMAIN_VERSION`` of the writer.
        model: digest of the model's configuration, quantisation excluded.
        weights: digest that tells two sets of weights with one configuration apart.
        revision: revision of the weights, resolved where it can be, else as it was named.
        quantization: quantisation method and a digest of its parameters, or "".
        compute_dtype: element type in which the model computes.
        length_scaling: what the computation takes from the engine's greatest length, or "".
        draft_model: method, configuration, weights and quantisation of the model that drafts, or
            "".
        layout: groups, block sizes, hash unit (vLLM's prefix match unit), ranks.
        scheduler_block_tokens: grid on which vLLM's scheduler hits and cuts, in tokens.
        hash_function: name of the prefix hash.
        hash_probe: hex of that function's chained hash over a fixed token sequence: differs where
            seeds or serialisation do.
        kv_dtype: element types of attention KV, quantisation of the cache included.
        state_dtypes: element types of the recurrent states, in the order of the state's parts.
        conv_layout: order of the convolution state's dimensions (vLLM: SD or DS), or "".
        kv_layout: order of an attention page's dimensions.
        attention_backend: names of the kernel families whose page interior this is.
        platform: device family and model.
        cpu_isa: instruction sets that decide a page's interior on a CPU, or "".
        tensor_parallel, pipeline_parallel: sharding of every object.
        pipeline_layers: layers of each stage, or "" with one stage.
        speculative_tokens: draft tokens; they change the recurrent page.
        vllm: major and minor version of vLLM, whose layouts may change between versions.
    """

    version: int = DOMAIN_VERSION
    model: Name
    weights: Text
    revision: Text = ""
    quantization: Text = ""
    compute_dtype: Name = ""
    length_scaling: Text = ""
    draft_model: Text = ""
    layout: CacheLayout
    scheduler_block_tokens: Tokens = 0
    hash_function: Name
    hash_probe: Name
    kv_dtype: Name
    state_dtypes: Annotated[tuple[Name, ...], msgspec.Meta(max_length=_DTYPES_MAX)] = ()
    conv_layout: Name = ""
    kv_layout: Name = ""
    attention_backend: Text = ""
    platform: Name
    cpu_isa: Text = ""
    tensor_parallel: _Ranks = 1
    pipeline_parallel: _Ranks = 1
    pipeline_layers: Annotated[str, msgspec.Meta(max_length=8 * _STAGES_MAX)] = ""
    speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    vllm: Name

    def canonical(self) -> bytes:
        """The record as canonical JSON."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def domain_id(self) -> DomainId:
        """The first 16 hex digits of the SHA-256 of the canonical record."""
        return DomainId(hashlib.sha256(self.canonical()).hexdigest()[:16])


class _Version(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


def parse_domain(record: bytes) -> DomainRecord:
    """Read a canonical record. Raises ``StoreRejected`` where it is not one of this version, or
    has values that no engine has."""
    _check_size(len(record))
    try:
        # First, and alone: a record of another version need not have this one's fields.
        version = msgspec.json.decode(record, type=_Version).version
        if version != DOMAIN_VERSION:
            raise StoreRejected(
                f"domain record of version {version}, this side speaks {DOMAIN_VERSION}: "
                "run the same Backhaul on both sides"
            )
        parsed = msgspec.json.decode(record, type=DomainRecord)
        canonical = parsed.canonical()
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise StoreRejected(f"malformed domain record: {_one_line(error)}") from None
    except UnsupportedError as error:
        raise StoreRejected(
            f"domain record with an impossible layout: {_one_line(error)}"
        ) from None
    _check_size(len(canonical))
    return parsed


def _check_size(nbytes: int) -> None:
    if nbytes > RECORD_BYTES_MAX:
        raise StoreRejected(
            f"domain record of {nbytes} bytes: at most {RECORD_BYTES_MAX} are taken; "
            "run the same Backhaul on both sides"
        )


def _one_line(error: Exception) -> str:
    """Its text, which may quote the record."""
    return " ".join(str(error).split())[:_ERROR_CHARACTERS]
