"""Digests and names that tell apart what a cache's bytes depend on: weights, hashes, machine."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

PROBE_BLOCKS: tuple[tuple[tuple[int, ...], tuple[Any, ...] | None], ...] = (
    (tuple(range(1, 17)), None),
    (tuple(range(100_000, 100_016)), (("lora", "adapter", "/adapter"), "salt")),
)
"""Token ids and extra keys of two chained blocks. Keys are among what serialisation decides."""

_SAMPLE_BYTES = 1 << 10
"""Per tensor. Training changes nearly all elements of a tensor that it changes."""
_CHUNKS = 1024
"""Samples of a file without an index of its tensors."""
_HEADER_BYTES_MAX = 100 << 20
"""What safetensors itself refuses to read."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*")
"""In vLLM's order of preference; the first that matches is what vLLM loads. Last, whatever there
is: a folder's path says nothing of what lies in it."""
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")


def digest(value: Any) -> str:
    """16 hex digits of a JSON-like value, the same for equal values in any process."""
    text = json.dumps(_plain(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """The value as JSON can have it. Sets have no order and objects may show their address, both
    of which differ from process to process."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(inner), sort_keys=True) for inner in value)
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text


def model_digest(hf_config: Any) -> str:
    """Digest of a configuration without what differs between copies of one model, and without
    its quantisation, which is told apart by ``quantization_name``."""
    config: dict[str, Any] = dict(hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version", "quantization_config", "_commit_hash"):
        config.pop(name, None)
    return digest(config)


def quantization_name(model_config: Any) -> str:
    """Method and a digest of its parameters; "" without quantisation."""
    method = str(model_config.quantization or "")
    of_checkpoint: Any = getattr(model_config.hf_config, "quantization_config", None)
    if hasattr(of_checkpoint, "to_dict"):
        of_checkpoint = of_checkpoint.to_dict()
    chosen = getattr(model_config, "quantization_config", None)
    if of_checkpoint is None and chosen is None:
        return method
    return f"{method}:{digest([of_checkpoint, chosen])}"


_TUNED_FROM_TOKENS = 32_768
"""Above it Llama 4 scales its queries by their position, unless its generation config decides."""


def length_scaling(model_config: Any, draft_config: Any = None) -> str:
    """What the computation takes from the engine's greatest length, as e.g. ``longrope:long``; ""
    where nothing does.

    The model's configuration does not tell: vLLM takes LongRoPE's long factors, for short prompts
    too, where ``max_model_len`` is above the original length, and some models compute dynamic NTK's
    base from it.
    """
    length = int(model_config.max_model_len)
    configs = [one.hf_text_config for one in (model_config, draft_config) if one is not None]
    rules = [rule for config in configs for rule in _length_rules(config, length)]
    if any("Llama4" in name for name in getattr(model_config, "architectures", None) or ()):
        generation = model_config.try_get_generation_config() | dict(
            model_config.override_generation_config
        )
        tuned = generation.get("attn_temperature_tuning", length > _TUNED_FROM_TOKENS)
        rules.append(f"temperature:{'tuned' if tuned else 'plain'}")
    return ", ".join(dict.fromkeys(rules))


def _length_rules(config: Any, length: int) -> Iterator[str]:
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("longrope", "su"):
            original: Any = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", 0
            )
            yield f"longrope:{'long' if length > original else 'short'}"
        elif kind == "dynamic":
            yield f"dynamic:{length}"


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """One mapping, or one per type of layer, as transformers has them."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, Mapping):
            yield found
            yield from (inner for inner in found.values() if isinstance(inner, Mapping))
            return


def revision_of(model_config: Any) -> str:
    """The commit that the weights were taken from where a hub told it, else as it was named."""
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    return str(commit or model_config.revision or "")


def weights_fingerprint(
    model: str, *, revision: str | None = None, cache: str | None = None, dummy: bool = False
) -> str:
    """Digest that tells two sets of weights apart without reading all of them.

    Of every weight file its name, size and, per tensor, the first and the middle kilobyte; a
    model that a hub delivered is looked up in its local ``cache``. Where that holds nothing, the
    model's name stands in. ``dummy``: vLLM draws the weights itself, from one seed.
    """
    if dummy:
        return "dummy"
    files = _weight_files(model, revision, cache)
    if not files:
        return f"name:{digest(model)}"
    state = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        state.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            for position in _positions(stream, size):
                stream.seek(position)
                state.update(stream.read(_SAMPLE_BYTES))
    return state.hexdigest()[:16]


def hash_probe(algorithm: str) -> str:
    """The chained hash of fixed blocks as this engine computes it.

    Does not touch vLLM's own starting value: with a seedless xxHash that is drawn later, so the
    probe is then another one for each engine, which is what its hashes are.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, resolve_none_hash_seed

    function = get_hash_fn_by_name(algorithm)
    value: Any = function(resolve_none_hash_seed(function))
    for tokens, extra_keys in PROBE_BLOCKS:
        value = hash_block_tokens(function, value, tokens, extra_keys)
    return bytes(value).hex()


def hashes_are_private(algorithm: str) -> bool:
    """Whether no other process computes the same hashes, so that nothing can be shared."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    function = get_hash_fn_by_name(algorithm)
    return bool(resolve_none_hash_seed(function) != resolve_none_hash_seed(function))


def platform_name() -> str:
    """Device family and model."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"cpu:{platform.machine()}"
    return f"{current_platform.device_name}:{current_platform.get_device_name()}"


def cpu_isa() -> str:
    """Instruction sets by which CPU kernels choose a page's interior; "" on another device."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ""
    return "+".join(flag for flag in _CPU_FLAGS if flag in _cpu_flags())


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features", "features", "isa")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _weight_files(model: str, revision: str | None, cache: str | None) -> list[Path]:
    folder = Path(model)
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        found = _hub_snapshot(model, revision, cache)
        if found is None:
            return []
        folder = found
    for pattern in _WEIGHTS:
        if files := sorted(file for file in folder.glob(pattern) if file.is_file()):
            return files
    return []


def _hub_snapshot(model: str, revision: str | None, cache: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (OSError, ValueError):  # not in the cache, or no name that a hub knows
        return None


def _positions(stream: BinaryIO, size: int) -> Iterator[int]:
    """Where to sample a weight file, in bytes: every tensor, or evenly where there is no index."""
    yield 0
    tensors = _tensors(stream, size)
    if tensors is None:
        yield from range(0, size, max(size // _CHUNKS, _SAMPLE_BYTES))
    else:
        for start, end in tensors:
            yield start
            yield (start + end) // 2


def _tensors(stream: BinaryIO, size: int) -> list[tuple[int, int]] | None:
    """(first, end) of every tensor of a safetensors file; None where it is none."""
    length = int.from_bytes(stream.read(8), "little")
    if not 0 < length <= min(size - 8, _HEADER_BYTES_MAX):
        return None
    try:
        header = json.loads(stream.read(length))
        places = [one["data_offsets"] for name, one in header.items() if name != "__metadata__"]
        return sorted((8 + length + int(a), 8 + length + int(b)) for a, b in places)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
