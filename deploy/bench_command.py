"""``backhaul bench``: experiments on real engines."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from backhaul.benchmarks.reuse.record import Budget, PromptEndAt
from backhaul.deploy.store_command import parse_size
from backhaul.protocols.errors import ConfigError

bench = typer.Typer(no_args_is_help=True, help="Experiments on real engines.")

POLICIES = ("none", "main_sparse", "input_end", "decode_end", "both", "auto")
"""Compared unless others are named: "boundaries" needs an application that supplies them."""
