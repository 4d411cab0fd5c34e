"""The cache domain as it is read from vLLM's own configuration objects.

Each case changes one thing that a user can change, and must give another domain that names it, and
under which nothing of the first one is ever consumable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import (
    Phi3LongRoPEScaledRotaryEmbedding,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from backhaul.connector import fingerprints
from backhaul.connector.conversion import unlike_groups
from backhaul.connector.engine import EngineFacts, _draft_model, cache_layout, engine_facts
from backhaul.protocols.checkpoint import (
    CheckpointKind,
    CheckpointManifest,
    ObjectKey,
    PublicationId,
    Reason,
)
from backhaul.protocols.comparison import Verdict, compare
from backhaul.protocols.domain import DomainRecord, parse_domain
from backhaul.protocols.errors import UnsupportedError
from backhaul.protocols.layout import CacheLayout, checkpoint_objects
from backhaul.transfer.backends.inprocess import InProcessPool, InProcessStore
from backhaul.transfer.base import GrantStatus, MemoryRegion, Store, WriteItem, Written
from backhaul.transfer.index import BlockIndex

BLOCK = 16
TIMEOUT_S = 5.0
LONG_ROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 1024,
    "short_factor": [1.0], "long_factor": [2.0],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class Engine:
    """A hybrid engine's configuration, before the facts are read."""

    def __init__(self, model: str) -> None:
        self.model = ModelConfig(
            model=model, tokenizer=model, skip_tokenizer_init=True, dtype="bfloat16", seed=0
        )
        self.block = BLOCK
        self.cache: dict[str, Any] = {}
        self.parallel = ParallelConfig()
        self.speculative: SpeculativeConfig | None = None
        self.attention: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32,
                                          "dtype": torch.bfloat16}  # fmt: skip
        self.state: dict[str, Any] = {"shapes": ((3, 8), (2, 4, 4)),
                                      "dtypes": (torch.bfloat16, torch.float32)}  # fmt: skip
        self.eagle = False

    def facts(self) -> EngineFacts:
        """As the connector's scheduler half reads them."""
        config = self.config()
        told = kv_cache_utils.generate_scheduler_kv_cache_config([self.groups(config)])
        return engine_facts(config, told)

    def layout(self) -> CacheLayout:
        """As its worker half reads it."""
        config = self.config()
        return cache_layout(config, self.groups(config))

    def config(self) -> VllmConfig:
        """vLLM's configuration, once the engine core has settled it."""
        config = VllmConfig(
            model_config=self.model,
            cache_config=CacheConfig(
                block_size=self.block,
                enable_prefix_caching=True,
                mamba_cache_mode="align",
                **self.cache,
            ),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=64,
                max_num_seqs=4,
                max_model_len=1024,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            parallel_config=self.parallel,
            kv_transfer_config=KVTransferConfig(
                kv_connector="BackhaulConnector",
                kv_connector_module_path="backhaul.connector",
                kv_role="kv_both",
                engine_id="engine",
            ),
        )
        config.speculative_config = self.speculative
        config.cache_config.kv_cache_layout = "LBHNC"
        return config

    def groups(self, config: VllmConfig) -> KVCacheConfig:
        """One attention and one recurrent group."""
        attention = FullAttentionSpec(block_size=self.block, **self.attention)
        state = MambaSpec(
            block_size=self.block,
            page_size_padded=1 << 16,
            mamba_cache_mode="align",
            **self.state,
        )
        groups = [
            KVCacheGroupSpec(["layer.0.attn", "layer.1.attn"], attention, self.eagle),
            KVCacheGroupSpec(["layer.0.mixer", "layer.1.mixer"], state),
        ]
        made = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
        made.hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(made, config)[1]
        return made


@pytest.fixture
def engine(model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)
    get_conv_state_layout.cache_clear()
    yield Engine(model)
    get_conv_state_layout.cache_clear()


# -- one change at a time ---------------------------------------------------------------------

Change = Callable[[Engine, pytest.MonkeyPatch], None]


def _kv_dtype(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.attention["dtype"] = torch.float16


def _fp8_cache(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.cache["cache_dtype"] = "fp8_e5m2"
    engine.attention |= {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}


def _state_dtype(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.state["dtypes"] = (torch.bfloat16, torch.bfloat16)


def _conv_layout(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    get_conv_state_layout.cache_clear()


def _block_size(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.block = 2 * BLOCK


def _prefix_match_unit(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.cache["prefix_match_unit"] = BLOCK // 2


def _tensor_parallel(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.parallel = copy(engine.parallel)
    engine.parallel.tensor_parallel_size = engine.parallel.world_size = 2
    engine.attention["num_kv_heads"] = 1
    engine.state["shapes"] = ((3, 4), (1, 4, 4))


def _pipeline_parallel(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.parallel = copy(engine.parallel)
    engine.parallel.pipeline_parallel_size = engine.parallel.world_size = 2


def _speculative(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=2,
        target_model_config=engine.model, target_parallel_config=engine.parallel,
    )  # fmt: skip
    engine.state["shapes"] = ((6, 8), (2, 4, 4))
    engine.eagle = True


def _quantization(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.model = copy(engine.model)
    engine.model.quantization = "fp8"


def _revision(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.model = copy(engine.model)
    engine.model.revision = "5f3a"


def _commit(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.model = copy(engine.model)
    engine.model.hf_config = copy(engine.model.hf_config)
    engine.model.hf_config._commit_hash = "0" * 40


def _hash_algorithm(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.cache["prefix_caching_hash_algo"] = "sha256_cbor"


def _hash_seed(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PYTHONHASHSEED", "7")


def _cpu_isa(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fingerprints, "_cpu_flags", lambda: frozenset({"avx2", "amx_tile"}))


def _compute_dtype(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.model = copy(engine.model)
    engine.model.dtype = torch.float32


def _model(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.model = copy(engine.model)
    engine.model.hf_config = copy(engine.model.hf_config)
    engine.model.hf_config.rms_norm_eps = 0.5


CHANGES: dict[str, tuple[Change, str]] = {
    "KV dtype": (_kv_dtype, "kv_dtype"),
    "quantised KV": (_fp8_cache, "kv_dtype"),
    "recurrent dtype": (_state_dtype, "state_dtypes"),
    "convolution layout": (_conv_layout, "conv_layout"),
    "block size": (_block_size, "layout.groups[0].block_tokens"),
    "prefix match unit": (_prefix_match_unit, "layout.hash_tokens"),
    "tensor parallel": (_tensor_parallel, "tensor_parallel"),
    "pipeline parallel": (_pipeline_parallel, "pipeline_parallel"),
    "speculative tokens": (_speculative, "speculative_tokens"),
    "quantisation": (_quantization, "quantization"),
    "revision": (_revision, "revision"),
    "hub commit": (_commit, "revision"),
    "hash algorithm": (_hash_algorithm, "hash_function"),
    "hash seed": (_hash_seed, "hash_probe"),
    "CPU instruction set": (_cpu_isa, "cpu_isa"),
    "compute dtype": (_compute_dtype, "compute_dtype"),
    "model": (_model, "model"),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_of_the_engine_is_another_domain_and_named(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, field = CHANGES[name]
    ours = engine.facts().domain
    change(engine, monkeypatch)
    theirs = engine.facts().domain
    assert ours.domain_id != theirs.domain_id
    found = compare(ours, theirs)
    assert found.verdict is Verdict.MISMATCH
    assert found.field == field
    causes = [one.path for one in found.causes]
    if name == "block size":  # of every group
        assert causes == ["layout.groups[0].block_tokens", "layout.groups[1].block_tokens"]
    else:
        assert causes == [field]
    for reader, writer in ((ours, theirs), (theirs, ours)):
        _never_consumable_in_the_index(reader, writer, field)
        _never_consumable_in_the_store(reader, writer, field)


def test_ranks_alone_are_convertible_where_every_page_is_known(engine: Engine) -> None:
    kind = MambaAttentionBackendEnum.SHORT_CONV
    engine.state = {"shapes": ((3, 8),), "dtypes": (torch.bfloat16,), "mamba_type": kind}
    ours = engine.facts().domain
    engine.parallel = copy(engine.parallel)
    engine.parallel.tensor_parallel_size = engine.parallel.world_size = 2
    engine.attention["num_kv_heads"] = 1
    engine.state["shapes"] = ((3, 4),)
    theirs = engine.facts().domain
    assert [group.page for group in ours.layout.groups] == [
        group.page for group in theirs.layout.groups
    ]
    for one, other in ((ours, theirs), (theirs, ours)):
        assert compare(one, other).verdict is Verdict.CONVERTIBLE
    assert parse_domain(theirs.canonical()) == theirs


@pytest.mark.parametrize("heads", [None, 1])
def test_a_layer_of_other_heads_leaves_pages_unknown_where_both_have_one_a_rank(
    engine: Engine, heads: int | None
) -> None:
    """vLLM names it for that layer alone; the cache specs of both are alike."""
    engine.model = copy(engine.model)
    engine.model.model_arch_config = replace(
        engine.model.model_arch_config,
        per_layer_overrides=[{}, {"total_num_kv_heads": heads}] if heads else None,
    )
    pages = []
    for ranks in (1, 2):
        engine.parallel = copy(engine.parallel)
        engine.parallel.tensor_parallel_size = engine.parallel.world_size = ranks
        engine.attention["num_kv_heads"] = 2 // ranks
        pages.append(engine.facts().layout.groups[0].page)
    assert [bool(page) for page in pages] == [True, heads is None]


def test_layers_of_pipeline_stages_are_told_apart(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pipeline_parallel(engine, monkeypatch)
    records = []
    for partition in ("0,1", "1,0"):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        records.append(engine.facts().domain)
    assert [one.pipeline_layers for one in records] == ["0,1", "1,0"]
    assert compare(*records).field == "pipeline_layers"


def test_the_same_engine_has_the_same_domain(engine: Engine, model: str) -> None:
    first = engine.facts().domain
    assert Engine(model).facts().domain == first == parse_domain(first.canonical())


def _hashes(record: DomainRecord, tokens: int) -> tuple[bytes, ...]:
    """As if both engines hashed alike, so that only the domain keeps them apart."""
    unit = record.layout.hash_tokens
    return tuple(hashlib.sha256(b"%d" % end).digest() for end in range(unit, tokens + unit, unit))


def _boundary_hashes(record: DomainRecord, tokens: int) -> list[bytes]:
    step = record.layout.boundary_tokens // record.layout.hash_tokens
    return list(_hashes(record, tokens)[step - 1 :: step])


_TOKENS = 4 * BLOCK


def _manifest(record: DomainRecord) -> CheckpointManifest:
    return CheckpointManifest(
        boundary=_TOKENS, hashes=_hashes(record, _TOKENS), kinds=(CheckpointKind.DECODE_END,)
    )


def _keys(record: DomainRecord) -> list[ObjectKey]:
    pairs = checkpoint_objects(record.layout, _TOKENS, _hashes(record, _TOKENS))
    return [ObjectKey(r, g, h) for r in range(record.layout.ranks) for g, h in pairs]


def _never_consumable_in_the_index(reader: DomainRecord, writer: DomainRecord, field: str) -> None:
    index = BlockIndex(1 << 20, publication_ttl_s=60.0, lease_max_s=60.0)
    there, here = index.open_domain(writer, 0.0), index.open_domain(reader, 0.0)
    name = PublicationId("p")
    grants = index.reserve(there, name, [(key, 64) for key in _keys(writer)], 0.0)
    for rank in range(writer.layout.ranks):
        written = [Written(g.key, g.token, 0) for g in grants if g.key.rank == rank]
        result = index.commit(there, name, rank, written, _manifest(writer), 0.0)
    assert result.visible
    answer = index.lookup(here, _boundary_hashes(reader, _TOKENS), 0, 10.0, 0.0)
    assert answer.lease is None
    (match,) = answer.matches
    assert (match.boundary, match.consumable) == (_TOKENS, False)
    assert (match.reason, match.field, match.domain) == (Reason.DOMAIN_MISMATCH, field, there)
    assert index.lookup(there, _boundary_hashes(writer, _TOKENS), 0, 0.0, 0.0).matches[0].consumable
    index.check()


def _never_consumable_in_the_store(reader: DomainRecord, writer: DomainRecord, field: str) -> None:
    pool = InProcessPool(1 << 20)
    store: Store = InProcessStore(pool)
    memory = np.ones(64, dtype=np.uint8)
    store.attach([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    place = np.array([(memory.ctypes.data, 64)], dtype=np.uint64)
    there = store.open_domain(writer, timeout_s=TIMEOUT_S)
    here = store.open_domain(reader, timeout_s=TIMEOUT_S)
    name = PublicationId("p")
    wants = [(key, 64) for key in _keys(writer)]
    grants = store.reserve(there, name, wants, timeout_s=TIMEOUT_S)
    assert {grant.status for grant in grants} == {GrantStatus.GRANTED}
    for rank in range(writer.layout.ranks):
        items = [WriteItem(grant, place) for grant in grants if grant.key.rank == rank]
        sent = store.write(items, timeout_s=TIMEOUT_S)
        manifest = _manifest(writer)
        store.commit(there, name, rank, sent.written, manifest, timeout_s=TIMEOUT_S)
    answer = store.lookup(
        here, _boundary_hashes(reader, _TOKENS), lease_s=10.0, timeout_s=TIMEOUT_S
    )
    assert answer.lease is None
    assert [(m.consumable, m.field) for m in answer.matches] == [(False, field)]
    own = store.lookup(there, _boundary_hashes(writer, _TOKENS), timeout_s=TIMEOUT_S)
    assert [m.consumable for m in own.matches] == [True]


# -- how the facts are read -------------------------------------------------------------------


def test_two_fp8_formats_that_are_stored_alike_differ(engine: Engine) -> None:
    engine.attention |= {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    records = []
    for name in ("fp8_e4m3", "fp8_e5m2", "fp8"):
        engine.cache["cache_dtype"] = name
        records.append(engine.facts().domain)
    assert compare(records[0], records[1]).field == "kv_dtype"
    assert records[0] == records[2], "vLLM's fp8 is e4m3"


@pytest.mark.parametrize(
    ("rope", "lengths", "values"),
    [
        (LONG_ROPE, (1024, 1025), ("longrope:short", "longrope:long")),
        ({"full_attention": LONG_ROPE}, (512, 4096), ("longrope:short", "longrope:long")),
        ({"rope_type": "dynamic", "factor": 2.0}, (512, 1024), ("dynamic:512", "dynamic:1024")),
        ({"rope_type": "yarn", "factor": 2.0}, (512, 4096), ("", "")),
    ],
    ids=["LongRoPE", "LongRoPE by layer type", "dynamic NTK", "YaRN"],
)
def test_what_the_greatest_length_decides_is_told_apart(
    engine: Engine, rope: dict[str, Any], lengths: tuple[int, int], values: tuple[str, str]
) -> None:
    """``--max-model-len`` is in no configuration of the model."""
    records = []
    engine.model.hf_config.rope_parameters = rope
    for length in lengths:
        engine.model = copy(engine.model)
        engine.model.max_model_len = length
        records.append(engine.facts().domain)
    assert tuple(one.length_scaling for one in records) == values
    assert compare(*records).field == ("length_scaling" if values[0] else "")


def test_longrope_s_factors_are_those_that_vllm_takes(engine: Engine) -> None:
    engine.model.hf_config.rope_parameters = LONG_ROPE
    config = VllmConfig(model_config=engine.model)
    for length in (1023, 1024, 1025):
        engine.model.max_model_len = length
        with set_current_vllm_config(config):
            made = Phi3LongRoPEScaledRotaryEmbedding(
                8, 8, 4096, 1024, 1e4, True, torch.float32, [1.0] * 4, [2.0] * 4
            )
        expected = "longrope:long" if made.use_long_rope else "longrope:short"
        assert fingerprints.length_scaling(engine.model) == expected


def test_llama_4_s_temperature_follows_the_length_unless_it_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(engine.model), "architectures", property(lambda self: ["Llama4ForCausalLM"])
    )
    found = []
    for length, told in ((32_768, {}), (32_769, {}), (1024, {"attn_temperature_tuning": True})):
        engine.model.max_model_len = length
        engine.model.override_generation_config = told
        found.append(fingerprints.length_scaling(engine.model))
    assert found == ["temperature:plain", "temperature:tuned", "temperature:tuned"]


def test_a_draft_of_another_quantisation_is_another_draft(engine: Engine) -> None:
    """Its layers have KV too."""
    load = SimpleNamespace(load_format="auto", download_dir=None)
    names = []
    for method in (None, "fp8"):
        draft = copy(engine.model)
        draft.quantization = method
        speculative = SimpleNamespace(method="eagle", draft_model_config=draft)
        names.append(_draft_model(speculative, engine.model, load))
    assert len(set(names)) == 2


def test_a_backend_that_is_not_known_ends_the_start(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two unknown ones must not pass for one."""

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no valid backend\nfor head size 7")

    monkeypatch.setattr(selector, "get_attn_backend", fails)
    with pytest.raises(UnsupportedError, match="--attention-backend") as refused:
        engine.facts()
    assert "head size 7" in str(refused.value) and "\n" not in str(refused.value)


def test_spelling_out_the_default_is_no_difference(engine: Engine) -> None:
    implied = engine.facts().domain
    engine.cache |= {"cache_dtype": "bfloat16", "prefix_match_unit": BLOCK}
    assert engine.facts().domain == implied


@pytest.mark.parametrize("unlike", ["size", "order", "dtype"])
def test_a_worker_reads_a_group_layer_by_layer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, unlike: str
) -> None:
    """vLLM tells the scheduler half the first layer's spec only."""
    assert unlike_groups(engine.facts().layout, engine.layout()) == []
    plain = Engine.groups
    other: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32,
                             "dtype": torch.bfloat16}  # fmt: skip
    other |= {"size": {"head_size": 64}, "order": {"num_kv_heads": 4, "head_size": 16},
              "dtype": {"dtype": torch.float16}}[unlike]  # fmt: skip

    def uniform(self: Engine, config: VllmConfig) -> KVCacheConfig:
        made = plain(self, config)
        group = made.kv_cache_groups[0]
        specs = dict(
            zip(group.layer_names, (group.kv_cache_spec, FullAttentionSpec(**other)), strict=True)
        )
        group.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)
        return made

    monkeypatch.setattr(Engine, "groups", uniform)
    assert unlike_groups(engine.facts().layout, engine.layout()) == [0]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("seed", [None, "3"])
def test_the_probe_is_the_chain_that_the_engine_computes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None
) -> None:
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    value = None
    for tokens, extra_keys in fingerprints.PROBE_BLOCKS:
        value = kv_cache_utils.hash_block_tokens(function, value, tokens, extra_keys)
    assert value is not None
    assert fingerprints.hash_probe(algorithm) == value.hex()


def test_reading_the_facts_leaves_vllm_s_hash_seed_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))
    before = kv_cache_utils.NONE_HASH
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    engine.facts()
    assert before == kv_cache_utils.NONE_HASH


def test_hashes_with_a_random_seed_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    pytest.importorskip("xxhash")
    assert fingerprints.hashes_are_private("xxhash")
    assert fingerprints.hash_probe("xxhash") != fingerprints.hash_probe("xxhash")
    for algorithm in ("sha256", "sha256_cbor"):
        assert not fingerprints.hashes_are_private(algorithm)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert not fingerprints.hashes_are_private("xxhash")
    assert fingerprints.hash_probe("xxhash") == fingerprints.hash_probe("xxhash")


_ATTENTION: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32,
                              "dtype": torch.bfloat16}  # fmt: skip


def _other_attention(spec: Any) -> Change:
    """Let the attention group be of another kind."""

    def change(engine: Engine, patch: pytest.MonkeyPatch) -> None:
        plain = Engine.groups

        def groups(self: Engine, config: VllmConfig) -> KVCacheConfig:
            made = plain(self, config)
            made.kv_cache_groups[0].kv_cache_spec = spec
            return made

        patch.setattr(Engine, "groups", groups)

    return change


def _stage_without_a_layer(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    plain = Engine.groups

    def groups(self: Engine, config: VllmConfig) -> KVCacheConfig:
        made = plain(self, config)
        made.kv_cache_groups[1].layer_names = []
        return made

    patch.setattr(Engine, "groups", groups)


def _context_parallel(name: str) -> Change:
    def change(engine: Engine, patch: pytest.MonkeyPatch) -> None:
        plain = Engine.config

        def config(self: Engine) -> VllmConfig:
            made = plain(self)
            made.parallel_config = copy(made.parallel_config)
            setattr(made.parallel_config, name, 2)
            return made

        patch.setattr(Engine, "config", config)

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "a window of what was generated": (
        _other_attention(RSWASpec(**_ATTENTION, rswa_window=32)), "group 0 is a RSWASpec",
    ),
    "sink attention": (
        _other_attention(SinkFullAttentionSpec(**_ATTENTION, sink_len=4)),
        "group 0 is a SinkFullAttentionSpec",
    ),
    "a group outside prefix caching": (
        _other_attention(
            SlidingWindowMLASpec(**_ATTENTION, sliding_window=32, bounded_replay=True)
        ),
        r"groups \[0\] take no part in prefix caching",
    ),
    "a stage without a group's layer": (
        _stage_without_a_layer, "group 1 has no layer on one of the pipeline stages",
    ),
    "decode over context": (
        _context_parallel("decode_context_parallel_size"), "decode_context_parallel_size=2",
    ),
    "prefill over context": (
        _context_parallel("prefill_context_parallel_size"), "prefill_context_parallel_size=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_engines_that_cannot_take_part_are_refused(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both halves: a worker fails at start as well."""
    change, message = REFUSED[name]
    change(engine, monkeypatch)
    for read in (engine.facts, engine.layout):
        with pytest.raises(UnsupportedError, match=message):
            read()


def test_a_digest_does_not_depend_on_the_process() -> None:
    class Opaque:
        pass

    value = {"set": {"b", "a", "c"}, 3: [1.5, None, True], "object": Opaque()}
    again = {"object": Opaque(), 3: (1.5, None, True), "set": {"c", "b", "a"}}
    assert fingerprints.digest(value) == fingerprints.digest(again)
    assert fingerprints.digest(value) != fingerprints.digest({**value, "set": {"a", "b"}})
    golden = {"set": {"b", "a"}, 3: [1.5, None, True]}
    assert fingerprints.digest(golden) == "a2b34c29723fde41"


# -- weights ----------------------------------------------------------------------------------


def _write(path: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path / "model.safetensors")


def test_any_tensor_tells_weights_apart_and_copies_do_not(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.full((64, 64), float(i)) for i in range(50)}
    prints = []
    for name in ("a", "copy", "b"):
        (tmp_path / name).mkdir()
        if name == "b":
            tensors["layer.37"] = tensors["layer.37"] + 1e-3
        _write(tmp_path / name, tensors)
        prints.append(fingerprints.weights_fingerprint(str(tmp_path / name)))
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "weights.odd"])
def test_weights_of_any_format_are_told_apart_by_content_not_by_path(
    tmp_path: Path, name: str
) -> None:
    prints = []
    for folder, byte in (("a", b"1"), ("copy", b"1"), ("b", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(byte * 5000)
        prints.append(fingerprints.weights_fingerprint(str(tmp_path / folder)))
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("content", [b"", b"\x08", b"\x02" + bytes(7) + b"{", bytes(64)])
def test_a_malformed_weight_file_is_no_fault(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert len(fingerprints.weights_fingerprint(str(tmp_path))) == 16


def test_a_name_that_no_hub_delivered_and_dummy_weights() -> None:
    assert fingerprints.weights_fingerprint("org/model").startswith("name:")
    assert fingerprints.weights_fingerprint("org/model", dummy=True) == "dummy"


# -- what the hash chain keeps apart ----------------------------------------------------------


def _chain(**keys: Any) -> tuple[bytes, ...]:
    """vLLM's own block hashes of one fixed prompt."""
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
    request = Request(
        request_id="r",
        prompt_token_ids=list(range(4 * BLOCK)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=hasher,
        **keys,
    )
    return tuple(bytes(value) for value in request.block_hashes)


def _image(identifier: str, offset: int = 5) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=8),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "first"),
    [
        ({}, {"lora_request": LoRARequest("a", 1, "/a")}, 0),
        (
            {"lora_request": LoRARequest("a", 1, "/a")},
            {"lora_request": LoRARequest("b", 2, "/b")},
            0,
        ),
        ({}, {"mm_features": [_image("cat")]}, 0),
        ({"mm_features": [_image("cat")]}, {"mm_features": [_image("dog")]}, 0),
        (
            {"mm_features": [_image("cat", 2 * BLOCK)]},
            {"mm_features": [_image("dog", 2 * BLOCK)]},
            2,
        ),
        ({}, {"cache_salt": "tenant"}, 0),
        ({"cache_salt": "tenant"}, {"cache_salt": "other"}, 0),
    ],
    ids=["no LoRA", "LoRA", "no image", "image", "later image", "no salt", "salt"],
)
def test_adapters_images_and_salts_never_match_each_other(
    engine: Engine, one: dict[str, Any], other: dict[str, Any], first: int
) -> None:
    """Same tokens, one domain: the chain alone keeps them apart, from ``first`` on."""
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))
    ours, theirs = _chain(**one), _chain(**other)
    assert len(ours) == len(theirs) == 4
    assert ours == _chain(**one), "and it is reproducible"
    assert ours[:first] == theirs[:first]
    assert not set(ours[first:]) & set(theirs[first:])
    index = BlockIndex(1 << 20, publication_ttl_s=60.0, lease_max_s=60.0)
    record = engine.facts().domain
    domain = index.open_domain(record, 0.0)
    manifest = CheckpointManifest(
        boundary=4 * BLOCK, hashes=ours, kinds=(CheckpointKind.DECODE_END,)
    )
    pairs = checkpoint_objects(record.layout, 4 * BLOCK, ours)
    keys = [ObjectKey(0, group, block_hash) for group, block_hash in pairs]
    grants = index.reserve(domain, PublicationId("p"), [(key, 64) for key in keys], 0.0)
    written = [Written(g.key, g.token, 0) for g in grants]
    assert index.commit(domain, PublicationId("p"), 0, written, manifest, 0.0).visible
    assert index.lookup(domain, list(ours), 0, 0.0, 0.0).matches[0].consumable
    for match in index.lookup(domain, list(theirs), 0, 0.0, 0.0).matches:
        # Attention of the common blocks, at most: no checkpoint of theirs.
        assert match.boundary <= first * BLOCK and match.reason is Reason.STATE_MISSING
        assert not (match.retained or match.hash_matched or match.consumable)
