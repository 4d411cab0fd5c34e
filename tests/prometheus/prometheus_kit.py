"""A real Prometheus for the length of a block."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest
import yaml

from backhaul.deploy.processes import free_port


@contextlib.contextmanager
def running_prometheus(
    folder: Path, jobs: Mapping[str, Sequence[str]], rules: Sequence[Path] = ()
) -> Iterator[httpx.Client]:
    """Scrapes the targets (``host:port``) of every job once a second; yields a client of its API,
    which may still be starting."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.fail("prometheus is missing: run scripts/setup, or apt-get install prometheus")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rule) for rule in rules],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]}
            for job, targets in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)
