"""Pages as vLLM cuts them: one unsharded state goes through vLLM's own weight loaders, which decide
which rank holds which channel and head, at 1, 2, 4 and 8 ranks; converting the shards of one into
those of another gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
    _make_fused_conv1d_weight_loader,
)
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.model_loader import weight_utils
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from backhaul.connector.pages import (
    describe_page,
    head_counts,
    is_replicated,
    with_kernel_blocks,
)
from backhaul.protocols.sharding import Page, Part, Rows, conversion, convert, page_bytes

RANKS = (1, 2, 4, 8)
LAYERS = 2
POSITIONS = 3
BLOCK = 16


def unsharded(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def become(patch: pytest.MonkeyPatch, ranks: int, rank: int) -> None:
    """Tell vLLM's parallel layers which rank they are."""
    for name, value in (("rank", rank), ("world_size", ranks)):
        for module in (linear, parameter):
            function = f"{module.__name__}.get_tensor_model_parallel_{name}"
            patch.setattr(function, lambda value=value: value)


@contextmanager
def default_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


Load = Callable[[torch.Tensor, int, int], torch.Tensor]
"""Of an unsharded convolution (channels, positions), the channels of a rank: ranks, rank."""


@dataclass(frozen=True)
class Model:
    """A family of recurrent states.

    ``parts`` are (channels, extra, duplicated) of the convolution, as vLLM's mixers hand them to
    their loader at a number of ranks; ``shapes`` is vLLM's calculator; ``load`` stands for that
    loader where a family has another.
    """

    kind: MambaAttentionBackendEnum
    config: SimpleNamespace
    parts: Callable[[int], list[tuple[int, int, bool]]]
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    ssm: tuple[int, ...] = ()
    ranks: tuple[int, ...] = RANKS
    dtypes: tuple[torch.dtype, ...] = field(default=(torch.bfloat16, torch.float32))
    load: Load | None = None

    def spec(self, ranks: int) -> MambaSpec:
        return MambaSpec(
            block_size=BLOCK,
            shapes=self.shapes(ranks),
            dtypes=self.dtypes[: len(self.shapes(ranks))],
            mamba_type=self.kind,
            mamba_cache_mode="align",
        )

    def shard(self, ranks: int, rank: int, patch: pytest.MonkeyPatch, conv_first: bool) -> bytes:
        """The object of one rank."""
        patch.setattr(weight_utils, "get_tensor_model_parallel_rank", lambda: rank)
        become(patch, ranks, rank)
        content = b""
        for layer in range(LAYERS):
            channels = sum(n - extra for n, extra, _ in self.parts(ranks))
            whole = unsharded(channels, POSITIONS, dtype=self.dtypes[0], seed=layer)
            if self.load is not None:
                conv = self.load(whole, ranks, rank)
            else:
                conv = torch.empty(sum(n for n, _, _ in self.parts(ranks)) // ranks, POSITIONS)
                conv = conv.to(self.dtypes[0])
                loader = mamba_v2_sharded_weight_loader(self.parts(ranks), ranks, rank)
                loader(torch.nn.Parameter(conv, requires_grad=False), whole)
            content += raw(conv if conv_first else conv.T)
            if self.ssm:
                state = unsharded(*self.ssm, dtype=self.dtypes[1], seed=100 + layer)
                own = torch.empty(self.ssm[0] // ranks, *self.ssm[1:])
                weight_utils.sharded_weight_loader(0)(own, state)
                content += raw(own)
        return content


def gated_delta_net(keys: int, values: int) -> Model:
    k, v = 8, 4
    return Model(
        MambaAttentionBackendEnum.GDN_ATTN,
        SimpleNamespace(
            linear_num_key_heads=keys, linear_num_value_heads=values,
            linear_key_head_dim=k, linear_value_head_dim=v,
        ),
        lambda ranks: [(keys * k, 0, False), (keys * k, 0, False), (values * v, 0, False)],
        lambda ranks: MambaStateShapeCalculator.gated_delta_net_state_shape(
            ranks, keys, values, k, v, POSITIONS + 1
        ),
        (values, v, k),
        tuple(n for n in RANKS if keys % n == 0),
    )  # fmt: skip


def mamba2(heads: int, groups: int, name: str = "n_groups") -> Model:
    dim, size = 4, 6

    def parts(ranks: int) -> list[tuple[int, int, bool]]:
        extra = MambaStateShapeCalculator.extra_groups_for_head_shards(groups, ranks)
        shared = ((groups + extra) * size, extra * size, bool(extra))
        return [(heads * dim, 0, False), shared, shared]

    return Model(
        MambaAttentionBackendEnum.MAMBA2,
        SimpleNamespace(**{name: groups}),
        parts,
        lambda ranks: MambaStateShapeCalculator.mamba2_state_shape(
            ranks, heads * dim, groups, heads, dim, size, POSITIONS + 1
        ),
        (heads, dim, size),
        tuple(n for n in RANKS if groups % n == 0 or groups == 1),
    )


def short_conv(channels: int) -> Model:
    return Model(
        MambaAttentionBackendEnum.SHORT_CONV,
        SimpleNamespace(),
        lambda ranks: [(channels, 0, False)],
        lambda ranks: MambaStateShapeCalculator.short_conv_state_shape(
            ranks, channels, POSITIONS + 1
        ),
    )


def kda(heads: int) -> Model:
    size = 8
    channels = heads * size

    def load(whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
        fused = torch.empty(3 * channels // ranks, 1, POSITIONS, dtype=whole.dtype)
        loader = _make_fused_conv1d_weight_loader([channels] * 3, ranks, rank)
        for part in range(3):
            loader(
                torch.nn.Parameter(fused, requires_grad=False),
                whole[part * channels : (part + 1) * channels],
                part,
            )
        return fused[:, 0]

    return Model(
        MambaAttentionBackendEnum.GDN_ATTN,
        SimpleNamespace(linear_attn_config={"num_heads": heads, "head_dim": size}),
        lambda ranks: [(channels, 0, False)] * 3,
        lambda ranks: MambaStateShapeCalculator.kda_state_shape(
            ranks, heads, size, conv_kernel_size=POSITIONS + 1
        ),
        (heads, size, size),
        load=load,
    )


def mamba1(channels: int) -> Model:
    def load(whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
        with default_config():
            convolution = linear.ColumnParallelLinear(
                POSITIONS, channels, bias=False, params_dtype=whole.dtype
            )
        convolution.weight.weight_loader(convolution.weight, whole)
        return convolution.weight.data

    return Model(
        MambaAttentionBackendEnum.MAMBA1,
        SimpleNamespace(),
        lambda ranks: [(channels, 0, False)],
        lambda ranks: MambaStateShapeCalculator.mamba1_state_shape(
            ranks, channels, 5, POSITIONS + 1
        ),
        (channels, 5),
        load=load,
    )


STATES = {
    "gated delta net": gated_delta_net(8, 8),
    "gated delta net, more value heads": gated_delta_net(8, 16),
    "gated delta net, few heads": gated_delta_net(2, 4),
    "KDA": kda(8),
    "mamba-1": mamba1(16),
    "mamba-2": mamba2(16, 8),
    "mamba-2, one group": mamba2(8, 1, "mamba_n_groups"),
    "short convolution": short_conv(24),
}


def describe(spec: Any, ranks: int, *, conv_first: bool = True, **more: Any) -> Page:
    known: dict[str, Any] = {"config": SimpleNamespace(), "kv_heads": 0, "kv_layout": "LBHNC"}
    return describe_page(spec, tensor=ranks, conv_first=conv_first, **(known | more))


def converted(page: Page, shards: list[bytes], ranks: int, rank: int) -> bytes:
    runs = conversion(page, len(shards), ranks, rank)
    sources = {run.source: np.frombuffer(shards[run.source], dtype=np.uint8) for run in runs}
    sizes = page_bytes(page, ranks), page_bytes(page, len(shards))
    return convert(runs, sources, LAYERS, *sizes).tobytes()


@pytest.mark.parametrize("conv_first", [True, False], ids=["DS", "SD"])
@pytest.mark.parametrize("name", STATES)
def test_states(name: str, conv_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = STATES[name]
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: conv_first)
    pages = {
        ranks: describe(model.spec(ranks), ranks, conv_first=conv_first, config=model.config)
        for ranks in model.ranks
    }
    assert len(model.ranks) > 1
    assert len(set(pages.values())) == 1 and pages[1], "one description for any number of ranks"
    shards = {
        ranks: [model.shard(ranks, rank, monkeypatch, conv_first) for rank in range(ranks)]
        for ranks in model.ranks
    }
    for ranks in model.ranks:
        assert len(shards[ranks][0]) == LAYERS * model.spec(ranks).real_page_size_bytes
    for sources in model.ranks:
        for ranks in model.ranks:
            for rank in range(ranks):
                assert converted(pages[1], shards[sources], ranks, rank) == shards[ranks][rank]


def attention_shard(
    heads: int, ranks: int, rank: int, patch: pytest.MonkeyPatch, layout: str, kernel_blocks: int
) -> bytes:
    """Keys and values of one block on one rank, by way of vLLM's projection: rows of its weight
    stand for the channels of a head, columns for tokens."""
    size = 6
    become(patch, ranks, rank)
    content = b""
    for layer in range(LAYERS):
        projection = linear.QKVParallelLinear(
            BLOCK, size, 8, heads, bias=False, params_dtype=torch.bfloat16
        )
        whole = unsharded(2, heads * size, BLOCK, dtype=torch.bfloat16, seed=layer)
        for one, shard in zip(whole, "kv", strict=True):
            projection.weight.weight_loader(projection.weight, one, shard)
        rows = projection.weight.data[projection.num_heads * size :]
        both = rows.view(2, projection.num_kv_heads, size, kernel_blocks, BLOCK // kernel_blocks)
        # (K/V, head, channel, kernel block, token) -> what vLLM's kernels see
        order = (3, 1, 4, 0, 2) if layout.index("H") < layout.index("N") else (3, 4, 1, 0, 2)
        content += raw(both.permute(order))
    return content


def attention_spec(heads: int, ranks: int, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=max(1, heads // ranks),
        head_size=6,
        dtype=torch.bfloat16,
        **more,
    )


@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("heads", [8, 4, 1])
def test_attention(
    heads: int,
    layout: str,
    kernel_blocks: int,
    monkeypatch: pytest.MonkeyPatch,
    default_vllm_config: None,
) -> None:
    """With fewer heads than ranks, vLLM copies them."""
    pages = {
        ranks: describe(attention_spec(heads, ranks), ranks, kv_heads=heads, kv_layout=layout)
        for ranks in RANKS
    }
    assert len(set(pages.values())) == 1 and pages[1]
    page = with_kernel_blocks(pages[1], layout, kernel_blocks)
    shards = {
        ranks: [
            attention_shard(heads, ranks, rank, monkeypatch, layout, kernel_blocks)
            for rank in range(ranks)
        ]
        for ranks in RANKS
    }
    for sources in RANKS:
        for ranks in RANKS:
            for rank in range(ranks):
                assert converted(page, shards[sources], ranks, rank) == shards[ranks][rank]


@pytest.fixture
def default_vllm_config() -> Iterator[None]:
    with default_config():
        yield


@pytest.mark.parametrize("spec", [SlidingWindowSpec, ChunkedLocalAttentionSpec])
def test_windows_and_chunks_are_cut_alike(spec: type) -> None:
    name = "sliding_window" if spec is SlidingWindowSpec else "attention_chunk_size"
    own = spec(block_size=BLOCK, num_kv_heads=2, head_size=6, dtype=torch.bfloat16, **{name: 32})
    assert describe(own, 2, kv_heads=4) == describe(attention_spec(4, 2), 2, kv_heads=4)


def test_a_latent_lies_on_every_rank() -> None:
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    page = describe(spec, 4)
    assert page_bytes(page, 1) == page_bytes(page, 4) == spec.real_page_size_bytes
    assert [run.source for run in conversion(page, 4, 2, 1)] == [0]


def test_what_vllm_declares_a_single_shard_lies_on_every_rank() -> None:
    """As the windows over a latent do, which are no MLA spec."""
    spec = SlidingWindowMLASpec(
        block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=32,
        max_tp_shards=1,
    )  # fmt: skip
    assert (
        describe(spec, 4) == describe(spec, 1) == (Rows(1, (Part(1, spec.real_page_size_bytes),)),)
    )


def test_a_state_that_vllm_declares_replicated_lies_on_every_rank() -> None:
    model = STATES["short convolution"]
    spec = replace(model.spec(1), tp_replicated=True)
    assert is_replicated(spec) and not is_replicated(model.spec(1))
    assert describe(spec, 4) == (Rows(1, (Part(1, spec.real_page_size_bytes),)),)


@pytest.mark.parametrize(("total", "drafted"), [(2, 4), (4, 2), (2, 8), (8, 2)])
@pytest.mark.parametrize("sources", RANKS)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_draft_s_page_is_never_cut_by_the_target_s_heads(
    total: int, drafted: int, sources: int, ranks: int
) -> None:
    """Both sides describe the draft's pages; where they agree, its shards convert to the byte."""
    pages = {
        n: describe(attention_spec(drafted, n), n, kv_heads=total, other_heads={total, drafted})
        for n in (sources, ranks)
    }
    assert not all(pages.values())
    target = describe(attention_spec(total, 1), 1, kv_heads=total, other_heads={total, drafted})
    assert target == describe(attention_spec(total, 1), 1, kv_heads=total)


def test_every_number_of_heads_that_a_configuration_names() -> None:
    config = SimpleNamespace(
        num_key_value_heads=8, num_global_key_value_heads=4, swa_num_key_value_heads=None,
        num_key_value_heads_per_layer=[2, 8], num_attention_heads=32, linear_num_key_heads=16,
    )  # fmt: skip
    assert head_counts(config) == {2, 4, 8}
    blocks = [SimpleNamespace(attention=SimpleNamespace(n_heads_in_group=n)) for n in (8, None, 16)]
    nested = SimpleNamespace(num_attention_heads=64, block_configs=[*blocks, {"experts": 4}])
    assert head_counts(nested) == {8, 4}


UNKNOWN: dict[str, Callable[[], Page]] = {
    "scales beside the elements": lambda: describe(
        attention_spec(4, 2, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD), 2, kv_heads=4
    ),
    "heads of a layer's own": lambda: describe(attention_spec(4, 2), 2, kv_heads=8),
    "heads that the ranks cannot share": lambda: describe(attention_spec(6, 4), 4, kv_heads=6),
    "another delta net": lambda: describe(STATES["gated delta net"].spec(2), 2),
    "other heads than configured": lambda: describe(
        STATES["gated delta net"].spec(2), 2, config=gated_delta_net(4, 8).config
    ),
    "KDA of other heads": lambda: describe(
        STATES["KDA"].spec(2), 2, config=SimpleNamespace(linear_attn_config={"num_heads": 4})
    ),
    "KDA that keeps more than convolution and matrix": lambda: describe(
        MambaSpec(
            block_size=BLOCK, shapes=(*STATES["KDA"].spec(2).shapes, (2, 8)),
            dtypes=(torch.bfloat16, torch.float32, torch.float32),
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN, mamba_cache_mode="align",
        ),
        2, config=STATES["KDA"].config,
    ),
    "a mamba-1 whose parts differ in channels": lambda: describe(
        MambaSpec(
            block_size=BLOCK, shapes=((8, 3), (4, 5)), dtypes=(torch.bfloat16, torch.float32),
            mamba_type=MambaAttentionBackendEnum.MAMBA1, mamba_cache_mode="align",
        ),
        2,
    ),
    "groups that nobody names": lambda: describe(STATES["mamba-2"].spec(2), 2),
    "groups that the ranks cannot share": lambda: describe(
        STATES["mamba-2"].spec(2), 2, config=SimpleNamespace(n_groups=3)
    ),
    "a linear attention": lambda: describe(
        MambaSpec(
            block_size=BLOCK, shapes=((2, 4, 4),), dtypes=(torch.float32,),
            mamba_type=MambaAttentionBackendEnum.LINEAR, mamba_cache_mode="align",
        ),
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_not_known_to_the_byte_is_not_described(what: str) -> None:
    assert UNKNOWN[what]() == ()
