"""A tiny random hybrid model whose output depends on every part of its cache.

Tests and the local cluster need a model that starts in seconds on a CPU and that notices a wrong
byte in its cache. Plain random weights do not: their recurrent layers forget within a few tokens.
:func:`build_tiny_model` writes a ``Qwen3NextForCausalLM`` (three gated-delta-net layers and one
full attention layer) with weights drawn so that far-away tokens decide the next one, and a
byte-level tokenizer under which generated text always re-tokenises to the generated tokens.
"""

import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FORMAT_VERSION = 2
MANIFEST = "tiny_model.json"

# Token id = byte value for the first 256 ids; these follow. The second field is true for tokens
# that decoding hides; reasoning and tool parsers must see the others.
SPECIAL_TOKENS = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<think>", False),
    ("</think>", False),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
)
TOKEN_IDS = {text: 256 + i for i, (text, _) in enumerate(SPECIAL_TOKENS)}

# The only bytes the model emits: no whitespace that a client may strip, nothing a parser reads.
EMITTED = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"

CHAT_TEMPLATE = """\
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' and tools and loop.first %}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- set reasoning = m.reasoning or m.reasoning_content %}
{%- if reasoning and (keep_reasoning or loop.index0 > ns.last_user) %}
{{- '<think>' + reasoning + '</think>' }}
{%- endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{%- set f = call.function or call %}
{{- '<tool_call>{"name": "' + f.name + '", "arguments": ' }}
{{- f.arguments if f.arguments is string else f.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking %}{{- '<think>' }}{% endif %}
{%- endif %}
"""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. With these a state page fits 32 tokens of attention KV. The last of
    every ``attention_interval`` layers is a full attention layer."""

    vocab: int = 320
    hidden: int = 256
    layers: int = 4
    attention_interval: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 192
    linear_heads: int = 2
    linear_head_dim: int = 64
    conv_kernel: int = 4
    experts: int = 2
    expert_hidden: int = 128
    max_tokens: int = 32768


SHAPE = Shape()


def build_tiny_model(
    directory: Path, *, seed: int = 0, attention_interval: int = SHAPE.attention_interval
) -> Path:
    """Write the model into ``directory`` unless it is there already; return ``directory``.

    Equal arguments give equal bytes. Safe when several processes build the same directory at once.
    With ``attention_interval=2`` each of two pipeline stages has layers of both kinds.
    """
    directory = Path(directory)
    shape = replace(SHAPE, attention_interval=attention_interval)
    manifest = {"format": FORMAT_VERSION, "seed": seed, "shape": asdict(shape)}
    if _is_built(directory, manifest):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f".{directory.name}.lock")):
        if not _is_built(directory, manifest):
            _build(directory, manifest, shape, seed)
    return directory


def _is_built(directory: Path, manifest: dict[str, object]) -> bool:
    try:
        found = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return bool(found == manifest)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(directory: Path, manifest: dict[str, object], shape: Shape, seed: int) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        new = scratch / "new"
        new.mkdir()
        save_file(_weights(shape, seed), new / "model.safetensors", metadata={"format": "pt"})
        (new / "model.safetensors").chmod(0o644)
        write_tokenizer(new)
        _write_json(new / "config.json", config_of(shape))
        _write_json(new / "generation_config.json", _token_config() | {"do_sample": False})
        _write_json(new / MANIFEST, manifest)
        if directory.exists():
            os.rename(directory, scratch / "stale")
        os.rename(new, directory)
    finally:
        shutil.rmtree(scratch)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _token_config() -> dict[str, object]:
    return {
        "bos_token_id": None,
        "eos_token_id": TOKEN_IDS["<|im_end|>"],
        "pad_token_id": TOKEN_IDS["<|endoftext|>"],
    }


def config_of(shape: Shape) -> dict[str, object]:
    """The model's ``config.json``."""
    return _token_config() | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "full_attention_interval": shape.attention_interval,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "linear_num_key_heads": shape.linear_heads,
        "linear_num_value_heads": shape.linear_heads,
        "linear_key_head_dim": shape.linear_head_dim,
        "linear_value_head_dim": shape.linear_head_dim,
        "linear_conv_kernel_dim": shape.conv_kernel,
        "num_experts": shape.experts,
        # Every expert is always active: a router that picks some would turn rounding into jumps.
        "num_experts_per_tok": shape.experts,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "intermediate_size": shape.expert_hidden,
        "moe_intermediate_size": shape.expert_hidden,
        "shared_expert_intermediate_size": shape.expert_hidden,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_tokens,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        # In bfloat16 the two best logits would often be equal.
        "head_dtype": "float32",
    }


def write_tokenizer(directory: Path) -> None:
    """Write the byte-level tokenizer and its chat template into ``directory``."""
    # Byte-level BPE without merges. The alphabet maps each byte to a printable character.
    alphabet = {_byte_character(b): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(text, special=hidden, normalized=False) for text, hidden in SPECIAL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": SHAPE.max_tokens,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _byte_character(byte: int) -> str:
    """Return the character that stands for ``byte`` in a byte-level vocabulary (as in GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


class _Weights:
    """Named random tensors, drawn in the order in which they are asked for."""

    # One hidden feature is the same for every token and no layer writes to it. Through it a
    # projection gets what Qwen3-Next has no parameter for: a bias.
    CONSTANT = 0

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, rows: int, columns: int, gain: float) -> torch.Tensor:
        """Return a matrix that maps unit-variance inputs to outputs of deviation ``gain``."""
        return torch.randn(rows, columns, generator=self._generator) * gain / math.sqrt(columns)

    def reader(self, rows: int, gain: float, bias: float = 0.0) -> torch.Tensor:
        """Return a projection out of the residual stream."""
        weight = self.normal(rows, self.shape.hidden, gain)
        weight[:, self.CONSTANT] = bias
        return weight

    def writer(self, columns: int, gain: float) -> torch.Tensor:
        """Return a projection into the residual stream."""
        weight = self.normal(self.shape.hidden, columns, gain)
        weight[self.CONSTANT] = 0.0
        return weight

    def put(self, name: str, tensor: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tensors[name] = tensor.to(dtype).contiguous()


def _weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    w = _Weights(shape, seed)
    embedding = w.reader(shape.vocab, math.sqrt(shape.hidden), bias=4.0)
    w.put("model.embed_tokens.weight", embedding)
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        w.put(f"{layer}.input_layernorm.weight", torch.zeros(shape.hidden))
        w.put(f"{layer}.post_attention_layernorm.weight", torch.zeros(shape.hidden))
        if (i + 1) % shape.attention_interval == 0:
            _put_attention(w, f"{layer}.self_attn")
        else:
            _put_delta_net(w, f"{layer}.linear_attn")
        _put_experts(w, f"{layer}.mlp")
    w.put("model.norm.weight", torch.zeros(shape.hidden))
    head = w.reader(shape.vocab, 0.0, bias=-12.0)
    head[list(EMITTED)] = w.reader(len(EMITTED), 1.9)
    w.put("lm_head.weight", head)
    return w.tensors


def _put_delta_net(w: _Weights, prefix: str) -> None:
    heads, dim, taps = w.shape.linear_heads, w.shape.linear_head_dim, w.shape.conv_kernel
    # Rows per head: query, key, value, output gate. Small queries and keys keep SiLU near its
    # linear part; otherwise all keys share a direction and the state holds little but a mean.
    gains = (0.3, 0.3, 1.0, 1.5)
    rows = [w.reader(dim, gain) for _ in range(heads) for gain in gains]
    w.put(f"{prefix}.in_proj_qkvz.weight", torch.cat(rows))
    # Rows per head: write strength, decay. A weak write (bias) leaves older entries in place.
    ba = [w.reader(1, gain, bias) for _ in range(heads) for gain, bias in ((0.7, -1.0), (0.5, 0.0))]
    w.put(f"{prefix}.in_proj_ba.weight", torch.cat(ba))
    # Keys see the two latest tokens, values the two before: a state of "what came before" differs
    # between prompts, one of "what comes with it" would be much the same for all text.
    masks = ((0.5, 0.5, 1.0, 1.0), (0.0, 0.0, 1.0, 1.0), (1.0, 1.0, 0.0, 0.0))
    conv = [w.normal(heads * dim, taps, 2.0) * torch.tensor(mask) for mask in masks]
    w.put(f"{prefix}.conv1d.weight", torch.cat(conv).unsqueeze(1))
    w.put(f"{prefix}.dt_bias", torch.zeros(heads))
    # Time constants in tokens, from short to long over the heads.
    spans = torch.logspace(math.log10(300), math.log10(4000), heads)
    w.put(f"{prefix}.A_log", -(spans * math.log(2)).log(), torch.float32)
    w.put(f"{prefix}.norm.weight", torch.ones(dim))
    w.put(f"{prefix}.out_proj.weight", w.writer(heads * dim, 1.2))


def _put_attention(w: _Weights, prefix: str) -> None:
    heads, kv_heads, dim = w.shape.heads, w.shape.kv_heads, w.shape.head_dim
    # Rows per head: query, output gate.
    queries = [w.reader(dim, 1.0) for _ in range(heads * 2)]
    w.put(f"{prefix}.q_proj.weight", torch.cat(queries))
    w.put(f"{prefix}.k_proj.weight", w.reader(kv_heads * dim, 1.0))
    w.put(f"{prefix}.v_proj.weight", w.reader(kv_heads * dim, 1.0))
    # Scores of deviation 2.5: attention falls on a few tokens instead of averaging over all.
    w.put(f"{prefix}.q_norm.weight", torch.full((dim,), 1.5))
    w.put(f"{prefix}.k_norm.weight", torch.zeros(dim))
    w.put(f"{prefix}.o_proj.weight", w.writer(heads * dim, 3.0))


def _put_experts(w: _Weights, prefix: str) -> None:
    w.put(f"{prefix}.gate.weight", w.reader(w.shape.experts, 1.0))
    w.put(f"{prefix}.shared_expert_gate.weight", w.reader(1, 1.0))
    experts = [f"experts.{j}" for j in range(w.shape.experts)]
    for name in (*experts, "shared_expert"):
        expert = f"{prefix}.{name}"
        w.put(f"{expert}.gate_proj.weight", w.reader(w.shape.expert_hidden, 1.0))
        w.put(f"{expert}.up_proj.weight", w.reader(w.shape.expert_hidden, 1.0))
        w.put(f"{expert}.down_proj.weight", w.writer(w.shape.expert_hidden, 1.0))
