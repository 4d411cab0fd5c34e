"""Layouts of model families from the KV cache specs that vLLM's own layers give, without running
them: what a family's checkpoint consists of, and that its objects are exactly its states' bytes.

This is how families are covered that no CPU can serve (see docs/groups.md): KDA, and Mamba-2 with
states that kernels export from inside a chunk.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import allocate_kv_cache

from backhaul.connector.conversion import unlike_groups
from backhaul.connector.engine import EngineFacts, cache_layout, engine_facts
from backhaul.connector.regions import GroupRegions, memory_regions
from backhaul.protocols.comparison import Verdict, compare
from backhaul.protocols.errors import UnsupportedError
from backhaul.protocols.layout import GroupKind, checkpoint_objects
from backhaul.protocols.stages import Portion, portions

BLOCK = 32
PAGE = 65536
"""Bytes of every page: recurrent ones are padded to it, as vLLM pads them to attention's."""


def layer(kind: type, **fields: Any) -> Any:
    """A layer of ``kind`` as far as its cache spec needs one: no weights, no kernels."""
    made = kind.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def kda(config: VllmConfig) -> Any:
    """Kimi-Linear: one convolution over q, k and v, and a state of head_dim x head_dim a head."""
    return layer(
        KimiGatedDeltaNetAttention, tp_size=1, num_heads=2, head_dim=64, conv_size=4, num_spec=0,
        model_config=config.model_config, cache_config=config.cache_config,
    )  # fmt: skip


def gated_delta_net(config: VllmConfig) -> Any:
    """Qwen3.5 and Qwen3-Next."""
    return layer(
        QwenGatedDeltaNetAttention, tp_size=1, num_k_heads=1, num_v_heads=2, head_k_dim=64,
        head_v_dim=64, conv_kernel_size=4, num_spec=0, model_config=config.model_config,
        cache_config=config.cache_config,
    )  # fmt: skip


def mamba_2(config: VllmConfig) -> Any:
    """Nemotron-H, Falcon-H1, Granite 4, Bamba."""
    return layer(
        mamba_mixer2.MambaMixer2, use_replayssm=False, intermediate_size=64, n_groups=1,
        num_heads=4, head_dim=16, ssm_state_size=64, conv_kernel_size=4, num_spec=0,
        model_config=config.model_config, cache_config=config.cache_config,
    )  # fmt: skip


def short_convolution(config: VllmConfig) -> Any:
    """LFM2: the only state is the last inputs."""
    return layer(
        short_conv.ShortConv, conv_dim=256, L_cache=3, num_spec=0, model_config=config.model_config,
        cache_config=config.cache_config,
    )  # fmt: skip


def full(config: VllmConfig) -> FullAttentionSpec:
    """A page of exactly ``PAGE`` bytes."""
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)


def latent(config: VllmConfig) -> MLAAttentionSpec:
    """MLA: one latent for all heads."""
    return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1024, dtype=torch.bfloat16)


def window(config: VllmConfig) -> SlidingWindowSpec:
    """Of 100 tokens."""
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=4, head_size=128, dtype=torch.bfloat16, sliding_window=100
    )


Make = Callable[[VllmConfig], Any]
FAMILIES: dict[str, tuple[Make, ...]] = {
    "Kimi-Linear (KDA, MLA)": (kda, kda, kda, latent),
    "Qwen3.5": (gated_delta_net, gated_delta_net, gated_delta_net, full),
    "Nemotron-H (Mamba-2)": (mamba_2, mamba_2, mamba_2, full),
    "LFM2": (short_convolution, short_convolution, full),
    "Gemma-3": (window, window, window, window, window, full),
}
RECURRENT = [name for name, layers in FAMILIES.items() if layers[0] not in (full, latent, window)]


@dataclass(frozen=True)
class Cache:
    """An engine's cache in ordinary memory, as its worker holds it."""

    facts: EngineFacts
    config: Any
    layers: Mapping[str, Any]  # recurrent layers, bound to their states
    tensors: Mapping[str, torch.Tensor]

    def regions(self, group: int) -> GroupRegions:
        """As the worker half builds them."""
        names = self.config.kv_cache_groups[group].layer_names
        return GroupRegions([self.tensors[name] for name in names], self.config.num_blocks)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """These layers ask vLLM's process groups, of which there are none here."""
    for module in (mamba_mixer2, short_conv):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder = tmp_path_factory.mktemp("model")
    model = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(model))
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16",
            seed=0, max_model_len=1024,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True,
                                 mamba_cache_mode="align", mamba_block_size=BLOCK),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=64, max_num_seqs=4, max_model_len=1024,
            enable_chunked_prefill=True, is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="BackhaulConnector", kv_connector_module_path="backhaul.connector",
            kv_role="kv_both", engine_id="engine",
        ),
    )  # fmt: skip
    config.cache_config.mamba_block_size = BLOCK
    config.cache_config.mamba_page_size_padded = PAGE
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


@pytest.fixture(params=list(FAMILIES))
def cache(
    request: pytest.FixtureRequest, vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> Cache:
    """A family's cache, laid out and allocated by vLLM."""
    layers, specs = {}, {}
    for i, make in enumerate(FAMILIES[request.param]):
        made = make(vllm_config)
        name = f"model.layers.{i}"
        if isinstance(made, torch.nn.Module):
            layers[name] = made
            specs[name] = made.get_kv_cache_spec(vllm_config)
        else:
            specs[name] = made
    monkeypatch.setattr(vllm_config.cache_config, "mamba_cache_mode", "align" if layers else "none")
    (config,) = get_kv_cache_configs(vllm_config, [specs], [64 * PAGE * len(specs)])
    tensors = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    for name, one in layers.items():
        one.bind_kv_cache(tensors[name])
    return Cache(told(vllm_config, config), config, layers, tensors)


def told(vllm_config: VllmConfig, *workers: Any) -> EngineFacts:
    """What the scheduler half reads, of which vLLM tells it less than its workers."""
    return engine_facts(vllm_config, generate_scheduler_kv_cache_config(list(workers)))


def read(regions: GroupRegions, block: int) -> bytes:
    return b"".join(ctypes.string_at(a, n) for a, n in regions.segments(block).tolist())


def write(regions: GroupRegions, block: int, payload: bytes) -> None:
    for address, nbytes in regions.segments(block).tolist():
        ctypes.memmove(address, payload[:nbytes], nbytes)
        payload = payload[nbytes:]


def states(cache: Cache, group: int, block: int) -> bytes:
    """What the group's layers would read as their states in ``block``."""
    names = cache.config.kv_cache_groups[group].layer_names
    return b"".join(
        state[block].contiguous().view(torch.uint8).numpy().tobytes()
        for name in names
        for state in cache.layers[name].kv_cache
    )


def test_a_checkpoint_is_one_state_or_the_blocks_below_it(cache: Cache) -> None:
    layout = cache.facts.layout
    assert layout.boundary_tokens == layout.hash_tokens == BLOCK
    hashes = [bytes([i]) * 32 for i in range(6)]
    found = checkpoint_objects(layout, 5 * BLOCK, hashes)
    expected = {GroupKind.RECURRENT: [4], GroupKind.FULL: [0, 1, 2, 3, 4],
                GroupKind.WINDOW: [1, 2, 3, 4]}  # fmt: skip
    for group in layout.groups:
        blocks = [hashes.index(name) for index, name in found if index == group.index]
        assert blocks == expected[group.kind]


def test_what_is_announced_is_what_lies_in_memory(cache: Cache) -> None:
    """Sizes that the scheduler half plans with are those of the worker half's segments."""
    total = memory_regions(cache.tensors)
    assert len(total) == 1
    for index, nbytes in cache.facts.object_bytes.items():
        regions = cache.regions(index)
        assert regions.object_bytes == nbytes
        for block in (1, regions.num_blocks - 1):
            for address, size in regions.segments(block).tolist():
                assert total[0].address <= address
                assert address + size <= total[0].address + total[0].nbytes


def test_blocks_of_a_group_do_not_overlap(cache: Cache) -> None:
    for group in cache.facts.layout.groups:
        regions = cache.regions(group.index)
        runs = sorted(
            tuple(run) for b in range(1, regions.num_blocks) for run in regions.segments(b).tolist()
        )
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(runs))


@pytest.mark.parametrize("cache", RECURRENT, indirect=True)
def test_an_object_is_exactly_the_layers_states(cache: Cache) -> None:
    generator = torch.Generator().manual_seed(7)
    for group in cache.facts.layout.groups:
        if group.kind is not GroupKind.RECURRENT:
            continue
        regions = cache.regions(group.index)
        for name in cache.config.kv_cache_groups[group.index].layer_names:
            for state in cache.layers[name].kv_cache:
                state[3] = torch.randn(state[3].shape, generator=generator).to(state.dtype)
        payload = read(regions, 3)
        assert payload == states(cache, group.index, 3)
        assert len(payload) == regions.object_bytes and any(payload)


@pytest.mark.parametrize("cache", RECURRENT, indirect=True)
def test_a_state_put_into_another_block_is_that_state_and_nothing_else_changes(
    cache: Cache,
) -> None:
    for group in cache.facts.layout.groups:
        regions = cache.regions(group.index)
        payload = bytes(i % 251 for i in range(regions.object_bytes))
        others = {
            (g.index, b): read(cache.regions(g.index), b)
            for g in cache.facts.layout.groups
            for b in (4, 6)
        }
        write(regions, 5, payload)
        assert read(regions, 5) == payload
        if group.kind is GroupKind.RECURRENT:
            assert states(cache, group.index, 5) == payload
        for (index, block), before in others.items():
            assert read(cache.regions(index), block) == before


def test_kimi_linear_names_its_parts(vllm_config: VllmConfig) -> None:
    """Three recurrent groups or one, and one latent group that all ranks hold alike."""
    spec = kda(vllm_config).get_kv_cache_spec(vllm_config)
    assert isinstance(spec, MambaSpec)
    # q, k and v of two heads of 64, three inputs deep; one 64 x 64 state a head.
    assert sorted(spec.shapes[0]) == [3, 3 * 2 * 64] and spec.shapes[1] == (2, 64, 64)
    assert spec.dtypes == (torch.bfloat16, torch.float32)


def test_mamba_2_can_export_a_state_from_inside_a_chunk(vllm_config: VllmConfig) -> None:
    """vLLM then cuts no chunk at a prompt's end; see ``Publisher._is_kept``."""
    spec = mamba_2(vllm_config).get_kv_cache_spec(vllm_config)
    assert (spec.num_prefill_checkpoint_blocks, spec.prefill_checkpoint_alignment) == (1, 1)


def test_align_mode_without_a_recurrent_layer_ends_the_start(vllm_config: VllmConfig) -> None:
    """vLLM's V1 runner would fail in every engine's first step ("no mamba layers in the model")."""
    specs = {"model.layers.0": full(vllm_config)}
    (config,) = get_kv_cache_configs(vllm_config, [specs], [64 * PAGE])
    assert not vllm_config.use_v2_model_runner
    with pytest.raises(UnsupportedError, match="no layer of this model is recurrent"):
        engine_facts(vllm_config, config)


def attention(heads: int = 4, size: int = 128, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"block_size": BLOCK, "num_kv_heads": heads, "head_size": size, "dtype": torch.bfloat16}
        | more
    )


UNLIKE: dict[str, tuple[FullAttentionSpec, FullAttentionSpec]] = {
    "DeepSeek-V3.2 (MLA, indexer)": (
        MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16),
        MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=132, dtype=torch.uint8),
    ),
    "a draft of other heads in pages of the same size": (attention(), attention(8, 64)),
    "a draft of other elements in pages of the same size": (
        attention(), attention(dtype=torch.float16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(UNLIKE))
@pytest.mark.parametrize("turned", [False, True])
def test_a_group_of_unlike_layers_is_never_taken_for_one_of_its_first(
    name: str, turned: bool, vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM tells the scheduler half the first layer's spec for all of them; its tensors show it."""
    monkeypatch.setattr(vllm_config.cache_config, "mamba_cache_mode", "none")
    pair = UNLIKE[name][::-1] if turned else UNLIKE[name]
    layers = dict(zip(("model.layers.0.a", "model.layers.1.a"), pair, strict=True))
    (config,) = get_kv_cache_configs(vllm_config, [layers], [256 * PAGE])
    (alike,) = get_kv_cache_configs(vllm_config, [dict.fromkeys(layers, pair[0])], [256 * PAGE])
    ours, theirs = (told(vllm_config, one).domain for one in (config, alike))
    (group,) = ours.layout.groups
    assert group.page == ()
    described = bool(theirs.layout.groups[0].page)
    assert described is (pair[0].num_kv_heads in (1, 4)), "as the model's heads are"
    assert compare(ours, theirs).field == "layout.groups[0].interior"
    assert unlike_groups(theirs.layout, cache_layout(vllm_config, config)) == [0]
    assert unlike_groups(theirs.layout, cache_layout(vllm_config, alike)) == []


def test_a_later_stage_whose_layers_differ_is_found_by_its_worker(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_config.cache_config, "mamba_cache_mode", "none")
    parallel = copy.copy(vllm_config.parallel_config)
    parallel.pipeline_parallel_size = parallel.world_size = 2
    monkeypatch.setattr(vllm_config, "parallel_config", parallel)
    monkeypatch.setattr(vllm_config.model_config, "get_total_num_hidden_layers", lambda: 4)
    specs = [attention(), attention(), attention(), attention(8, 64)]
    stages = [{f"model.layers.{i}.attn": specs[i] for i in part} for part in ((0, 1), (2, 3))]
    first, second = get_kv_cache_configs(vllm_config, stages, [256 * PAGE] * 2)
    layout = told(vllm_config, first, second).layout
    assert unlike_groups(layout, cache_layout(vllm_config, second)) == [0]


def test_which_layers_are_quantised_and_how_decides_also_beyond_the_first(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--kv-cache-dtype-skip-layers``: objects of one size whose layers lie in other places."""
    monkeypatch.setattr(vllm_config.cache_config, "mamba_cache_mode", "none")
    coded = attention(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    records = []
    for dtype, skipped in (("fp8", 0), ("fp8_e4m3", 0), ("fp8_e5m2", 0), ("fp8", 1), ("fp8", 2)):
        monkeypatch.setattr(vllm_config.cache_config, "cache_dtype", dtype)
        layers = {
            f"model.layers.{i}.attn": attention() if i == skipped else coded for i in range(3)
        }
        (config,) = get_kv_cache_configs(vllm_config, [layers], [256 * PAGE])
        records.append(told(vllm_config, config).domain)
    assert records[0] == records[1], "vLLM's fp8 is e4m3"
    others = records[1:]
    assert len({one.domain_id for one in others}) == len(others)


@pytest.mark.parametrize("name", ["LFM2", "Gemma-3"])
def test_groups_of_two_pipeline_stages_are_a_cut_of_the_single_one_s(
    name: str, vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own grouping; so their checkpoints are convertible, and it is known how."""
    specs = {}
    for i, make in enumerate(2 * FAMILIES[name]):
        made = make(vllm_config)
        is_layer = isinstance(made, torch.nn.Module)
        specs[f"model.layers.{i}.mixer"] = made.get_kv_cache_spec(vllm_config) if is_layer else made
    mode = "align" if name in RECURRENT else "none"
    monkeypatch.setattr(vllm_config.cache_config, "mamba_cache_mode", mode)
    names, half = list(specs), len(specs) // 2
    memory = 64 * PAGE * len(specs)
    (single,) = get_kv_cache_configs(vllm_config, [specs], [memory])
    stages = [{n: specs[n] for n in part} for part in (names[:half], names[half:])]
    first, second = get_kv_cache_configs(vllm_config, stages, [memory, memory])
    one = told(vllm_config, single).domain
    parallel = copy.copy(vllm_config.parallel_config)
    parallel.pipeline_parallel_size = parallel.world_size = 2
    monkeypatch.setattr(vllm_config, "parallel_config", parallel)
    monkeypatch.setattr(vllm_config.model_config, "get_total_num_hidden_layers", lambda: 2 * half)
    two = told(vllm_config, first, second).domain
    for worker in (first, second):
        assert unlike_groups(two.layout, cache_layout(vllm_config, worker)) == []
    assert two.pipeline_layers == f"{half},{half}"
    assert compare(one, two).verdict is compare(two, one).verdict is Verdict.CONVERTIBLE
    for index, group in enumerate(single.kv_cache_groups):
        shares = [config.kv_cache_groups[index].layer_names for config in (first, second)]
        assert group.layer_names == shares[0] + shares[1]
        assert portions(one, two, index, 0, len(group.layer_names)) == [
            Portion(stage, len(share), 0, len(share)) for stage, share in enumerate(shares)
        ]
        for stage, share in enumerate(shares):
            at = group.layer_names.index(share[0])
            whole = Portion(0, len(group.layer_names), at, len(share))
            assert portions(two, one, index, stage, len(share)) == [whole]
