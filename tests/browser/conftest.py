"""Debian's chromium, driven by its own chromedriver; nothing is downloaded."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "deploy"))


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is missing: run scripts/setup, or as root apt-get install {name}")
    return path


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = _program("chromium")
    # No sandbox: containers run tests as root, which chromium's sandbox refuses.
    for argument in ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    service = webdriver.ChromeService(executable_path=_program("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    try:
        yield browser
    finally:
        browser.quit()
