"""Where the services of one command log to, and what becomes of it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def log_folder(prefix: str, given: Path | None = None, *, keep: bool = False) -> Iterator[Path]:
    """A folder for the length of the block: ``given``, which stays, or a new temporary one, which
    stays only with ``keep`` or where the block fails. That is said then; Ctrl-C and SIGTERM are no
    failure."""
    if given is not None:
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    failed = False
    try:
        yield folder
    except Exception:
        failed = True
        raise
    finally:
        if not (keep or failed):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"backhaul: logs are kept in {folder}", file=sys.stderr)
