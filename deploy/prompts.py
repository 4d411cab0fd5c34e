"""Prompts from files: token ids as JSON, or text with a tokenizer; and their prefix hashes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from backhaul.deploy.arguments import file_to_read, read_bounded
from backhaul.deploy.requirements import ENGINE, need
from backhaul.protocols.errors import ConfigError

PROMPT_BYTES_MAX = 64 << 20
"""Several million tokens, as JSON."""
HASH_TIMEOUT_S = 180.0
"""Importing vLLM takes ten seconds, and far more on a busy machine."""


class Hashes(NamedTuple):
    """A prompt's chained block hashes, and the probe that tells whether engines hash alike."""

    hashes: tuple[bytes, ...]
    probe: str


class PromptReader:
    """Turns files into token ids, and ids into text."""

    def __init__(self, tokenizer: Path | None, *, special_tokens: bool) -> None:
        """``tokenizer``: a model's folder or a tokenizer.json. Raises ``ConfigError``."""
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer else None
        self._special_tokens = special_tokens

    def read(self, source: str) -> list[int]:
        """Token ids of a file, or of standard input for `-`. Raises ``ConfigError``."""
        if source == "-":
            raw = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
            if len(raw) > PROMPT_BYTES_MAX:
                raise ConfigError(f"the prompt is larger than {PROMPT_BYTES_MAX} bytes")
        else:
            raw = read_bounded("prompt", source, PROMPT_BYTES_MAX)
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"prompt {source!r} is not UTF-8 text: {error}") from None
        tokens = parse_token_ids(text)
        if tokens is not None:
            return tokens
        if self._tokenizer is None:
            raise ConfigError(
                f"prompt {source!r} is no JSON list of token ids: give --tokenizer DIR for text"
            )
        encoded = self._tokenizer.encode(text, add_special_tokens=self._special_tokens)
        return [int(token) for token in encoded.ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """The tokens' text with special tokens, or their ids where there is no tokenizer."""
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def parse_token_ids(text: str) -> list[int] | None:
    """Ids of a JSON list, or of an object with `prompt_token_ids` or `tokens` (as vLLM's /tokenize
    answers); None where the text is no such thing. Raises ``ConfigError`` for impossible ids."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        value = value.get("prompt_token_ids", value.get("tokens"))
    if not isinstance(value, list) or not value:
        return None
    for index, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**32:
            raise ConfigError(f"token {index} is {str(token)[:40]!r}: give ids of 0 and above")
    return value


def load_tokenizer(path: Path) -> Any:
    """A tokenizer of the `tokenizers` library. Raises ``ConfigError``."""
    file = path / "tokenizer.json" if path.is_dir() else path
    file_to_read("tokenizer", str(file))
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("text needs the tokenizers library: pip install tokenizers") from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # its errors share no base below Exception
        raise ConfigError(f"tokenizer {str(file)!r} cannot be read: {error}") from None


def hash_prompt(
    tokens: Sequence[int], algorithm: str, hash_tokens: int, cache_salt: str = ""
) -> Hashes:
    """Prefix hashes as vLLM computes them, in a process that has it. Raises ``ConfigError``."""
    need("hashing a prompt as vLLM does", *ENGINE)
    request = {
        "tokens": list(tokens),
        "algorithm": algorithm,
        "hash_tokens": hash_tokens,
        "cache_salt": cache_salt or None,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "backhaul.connector.prefix_hashes"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=HASH_TIMEOUT_S,
            check=False,
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1]) if not done.returncode else None
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        answer, done = None, None
    if answer is None:
        lines = done.stderr.strip().splitlines() if done else []
        raise ConfigError(
            f"vLLM cannot hash the prompt ({lines[-1] if lines else 'no answer'}): run this in the "
            "engine's environment"
        )
    return Hashes(tuple(bytes.fromhex(one) for one in answer["hashes"]), answer["probe"])
