"""What a page of one layer consists of, where that is known: see ``backhaul.protocols.sharding``.

Derived from what vLLM says of the page and, independently, from the model's configuration; where
the two do not agree to the byte, the page counts as unknown and is never converted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from backhaul.protocols.sharding import Page, Part, Rows, divides, page_bytes


def is_replicated(spec: Any) -> bool:
    """Whether every tensor-parallel rank computes all of it: one latent for all heads, or what
    vLLM declares so."""
    from vllm.v1 import kv_cache_interface as kv

    return (
        type(spec) is kv.MLAAttentionSpec
        or getattr(spec, "max_tp_shards", None) == 1
        or getattr(spec, "tp_replicated", False)
    )


def head_counts(config: Any) -> set[int]:
    """Every number of KV heads that a model's configuration names, whatever layers they are of."""
    found = [v for name, v in vars(config).items() if name.endswith(_HEADS) and v is not None]
    each = [one for value in found for one in (value if isinstance(value, list) else [value])]
    # Nemotron-NAS names, for each layer, how many heads share one.
    blocks = [getattr(one, "attention", None) for one in getattr(config, "block_configs", ())]
    shared = {heads for one in blocks if (heads := getattr(one, "n_heads_in_group", None))}
    each += [config.num_attention_heads // heads for heads in shared]
    return {one for one in each if isinstance(one, int)}


_HEADS = ("key_value_heads", "kv_heads", "key_value_heads_per_layer", "kv_heads_per_layer")


def describe_page(
    spec: Any,
    *,
    config: Any,
    tensor: int,
    kv_heads: int,
    other_heads: Collection[int] = (),
    kv_layout: str,
    conv_first: bool,
) -> Page:
    """The page of ``spec`` (vLLM's), or () where it is not known.

    Args:
        config: the model's configuration (text part), which names heads and groups.
        tensor: tensor-parallel ranks.
        kv_heads: KV heads of the model over all ranks.
        other_heads: numbers of KV heads that some of its layers, or those of a model that drafts,
            may have instead.
        kv_layout: vLLM's name of the order of dimensions, e.g. ``LBHNC``.
        conv_first: a convolution state is stored as (channels, positions) and not the other way.
    """
    from vllm.v1 import kv_cache_interface as kv

    page: Page = ()
    if is_replicated(spec):
        page = (Rows(1, (Part(1, spec.real_page_size_bytes),)),)
    elif isinstance(spec, kv.MambaSpec):
        describe = _STATES.get(spec.mamba_type.name)
        page = describe(spec, config, tensor, conv_first) if describe else ()
    elif type(spec) in (kv.FullAttentionSpec, kv.SlidingWindowSpec, kv.ChunkedLocalAttentionSpec):
        page = _attention(spec, tensor, kv_heads, other_heads, kv_layout)
    known = page and divides(page, tensor) and page_bytes(page, tensor) == spec.real_page_size_bytes
    return page if known else ()


def with_kernel_blocks(page: Page, kv_layout: str, blocks: int) -> Page:
    """An attention page that kernels see as ``blocks`` smaller ones, each with all its heads."""
    if blocks == 1 or kv_layout.index("H") < kv_layout.index("B"):
        return page
    if kv_layout.index("N") < kv_layout.index("H"):  # a row is one token already
        return page
    return tuple(
        Rows(rows.count * blocks, tuple(Part(p.units, p.nbytes // blocks) for p in rows.parts))
        for rows in page
    )


def _attention(
    spec: Any, tensor: int, kv_heads: int, other_heads: Collection[int], kv_layout: str
) -> Page:
    local = spec.num_kv_heads
    if int(spec.kv_quant_mode) or spec.num_heads != local or local != max(1, kv_heads // tensor):
        return ()  # scales lie among the elements, or the layer has heads of its own
    if any(local == max(1, n // tensor) for n in other_heads if n != kv_heads):
        return ()  # with so many ranks nobody can tell how many heads all of them hold
    nbytes = spec.real_page_size_bytes // local
    if kv_layout.index("H") < kv_layout.index("N") < kv_layout.index("C"):
        return (Rows(1, (Part(kv_heads, nbytes),)),)
    if kv_layout.index("N") < kv_layout.index("H") < kv_layout.index("C"):
        return (Rows(spec.block_size, (Part(kv_heads, nbytes // spec.block_size),)),)
    return ()


def _gated_delta_net(spec: Any, config: Any, tensor: int, conv_first: bool) -> Page:
    """Convolution over q, k, v; a matrix per value head. KDA has as many keys as values, of one
    size."""
    names = (
        "linear_num_key_heads", "linear_num_value_heads",
        "linear_key_head_dim", "linear_value_head_dim",
    )  # fmt: skip
    kda = getattr(config, "linear_attn_config", None)
    if all(hasattr(config, name) for name in names):
        keys, values, key_dim, value_dim = (int(getattr(config, name)) for name in names)
    elif isinstance(kda, Mapping) and {"num_heads", "head_dim"} <= kda.keys():
        keys = values = int(kda["num_heads"])
        key_dim = value_dim = int(kda["head_dim"])
    else:
        return ()
    if len(spec.shapes) != 2 or keys % tensor or values % tensor:
        return ()
    parts = ((keys, key_dim), (keys, key_dim), (values, value_dim))
    state = Part(values, value_dim * key_dim * _item(spec, 1))
    return (_conv(spec, parts, conv_first), Rows(1, (state,)))


def _mamba1(spec: Any, config: Any, tensor: int, conv_first: bool) -> Page:
    """Convolution over channels; a row of the state for each of them."""
    if len(spec.shapes) != 2 or len(spec.shapes[1]) != 2:
        return ()
    local, state_size = spec.shapes[1]
    if spec.shapes[0][0 if conv_first else 1] != local:
        return ()
    state = Part(local * tensor, state_size * _item(spec, 1))
    return (_conv(spec, ((local * tensor, 1),), conv_first), Rows(1, (state,)))


def _mamba2(spec: Any, config: Any, tensor: int, conv_first: bool) -> Page:
    """Convolution over x, B, C; a matrix per head. A single group is copied to all ranks."""
    names = ("n_groups", "mamba_n_groups", "mamba_ngroups")
    groups = next((int(getattr(config, name)) for name in names if hasattr(config, name)), 0)
    if len(spec.shapes) != 2 or not groups or (groups % tensor and groups != 1):
        return ()
    local, head_dim, state_size = spec.shapes[1]
    heads = local * tensor
    parts = ((heads, head_dim), (groups, state_size), (groups, state_size))
    state = Part(heads, head_dim * state_size * _item(spec, 1))
    return (_conv(spec, parts, conv_first), Rows(1, (state,)))


def _short_conv(spec: Any, config: Any, tensor: int, conv_first: bool) -> Page:
    """Nothing but a convolution, over channels."""
    if len(spec.shapes) != 1:
        return ()
    channels = spec.shapes[0][0 if conv_first else 1]
    return (_conv(spec, ((channels * tensor, 1),), conv_first),)


_STATES: dict[str, Callable[[Any, Any, int, bool], Page]] = {
    "GDN_ATTN": _gated_delta_net,
    "MAMBA1": _mamba1,
    "MAMBA2": _mamba2,
    "SHORT_CONV": _short_conv,
}
"""By the name of vLLM's kind of state."""


def _conv(spec: Any, parts: tuple[tuple[int, int], ...], conv_first: bool) -> Rows:
    """The convolution state: positions by channels, of (units, channels a unit) side by side."""
    positions = spec.shapes[0][1 if conv_first else 0]
    item = _item(spec, 0)
    if conv_first:
        return Rows(1, tuple(Part(n, channels * positions * item) for n, channels in parts))
    return Rows(positions, tuple(Part(n, channels * item) for n, channels in parts))


def _item(spec: Any, part: int) -> int:
    return int(spec.dtypes[part].itemsize)
