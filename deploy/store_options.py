"""Options that several commands which ask a store have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from backhaul.deploy.arguments import each, file_or_folder, seconds, store_uri

DEFAULT_STORE = "backhaul://127.0.0.1:7400"

StoreUri = Annotated[
    str,
    typer.Option(
        metavar="URI",
        help="The store's address, backhaul://HOST:PORT.",
        callback=each(store_uri),
    ),
]
StoreTimeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Longest wait for the store.", callback=each(seconds)),
]
TokenizerFolder = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="The model's folder, for text.", callback=each(file_or_folder)
    ),
]
CacheSalt = Annotated[
    str, typer.Option(metavar="TEXT", help="The request's cache_salt, where it had one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
