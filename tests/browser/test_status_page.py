"""The store's status page in a real browser, against a real daemon."""

from __future__ import annotations

import re
import signal
from typing import Any

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from store_kit import GRID, RunningStore, chain, running_store

from backhaul.protocols import store_pb2
from backhaul.protocols.metrics import KINDS, STORE
from backhaul.transfer.daemon.status import ADVICE

WAIT_S = 60
SHIFT_MAX = 0.01
"""Sum of layout shifts of a page's life; 0.1 is what browsers' makers call good."""

_WATCH_SHIFTS = """
window.shifts = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.shifts += entry.value;
}).observe({type: "layout-shift", buffered: true});
"""


def text(driver: webdriver.Chrome, selector: str) -> str:
    return str(driver.find_element(By.CSS_SELECTOR, selector).text)


def value(driver: webdriver.Chrome, name: str) -> str:
    return text(driver, f'[data-value="{name}"]')


def texts(driver: webdriver.Chrome, selector: str) -> list[str]:
    """Of every element that fits, at one moment: the page replaces its rows as it refreshes."""
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText.trim())"
    return list(driver.execute_script(script, selector))


def wait_for(driver: webdriver.Chrome, what: Any) -> None:
    WebDriverWait(driver, WAIT_S, poll_frequency=0.2).until(what)


def wait_for_state(driver: webdriver.Chrome, state: str) -> None:
    wait_for(driver, lambda d: d.find_element(By.CSS_SELECTOR, f'body[data-state="{state}"]'))


def open_page(driver: webdriver.Chrome, store: RunningStore, width: int = 1200) -> None:
    driver.set_window_size(width, 900)
    driver.get(f"http://{store.http}/")
    driver.execute_script(_WATCH_SHIFTS)
    wait_for_state(driver, "live")


def test_from_empty_to_full_to_gone_to_restarted(driver: webdriver.Chrome) -> None:
    with running_store("--capacity=1MiB") as store:
        open_page(driver, store)
        assert value(driver, "lookups") == "0" and "0 B of 1.0 MiB" in text(driver, "#pool-text")
        assert f'"store": "{store.uri}"' in text(driver, "#domains")
        assert "yet" in text(driver, "#recent")

        domain = store.open("page", "<img src=x onerror=document.title='hit'>")
        for number in range(12):  # more than the pool holds
            store.publish(domain, "abcdefghijklm"[number], "decode_end", nbytes=100 << 10)
        store.lookup(domain, "l")
        store.lookup(domain, "z")
        store.lookup(domain, "a")
        wait_for(driver, lambda d: value(d, "lookups") == "3")
        assert value(driver, "matched") == "1" and value(driver, "consumable") == "1"
        assert text(driver, '[data-share="matched"]') == "33 %"
        assert value(driver, "evicted") == "1" and int(value(driver, "evictions")) > 0
        assert "--capacity" in text(driver, "#advice")
        cells = texts(driver, "#domains td")
        assert cells[0] == domain[:8] and cells[1].startswith("<img src=x")
        assert cells[2 + KINDS.index("decode_end")] == cells[7] == value(driver, "checkpoints")
        assert texts(driver, "#recent tr:first-child td")[1:3] == ["not consumable", "evicted"]
        assert driver.title == "Backhaul store"
        assert driver.execute_script("return window.shifts") < SHIFT_MAX
        logged = driver.get_log("browser")
        assert [entry for entry in logged if entry["level"] == "SEVERE"] == []

        http = store.http
        store.process.send_signal(signal.SIGTERM)
        store.process.wait(60)
        wait_for_state(driver, "unreachable")
        assert "unreachable since" in text(driver, "#state")
        page = text(driver, "main")
        numbers = [e.text for e in driver.find_elements(By.CSS_SELECTOR, "[data-value]")]
        assert set(numbers) == {"\u2013"} and domain[:8] not in page and "MiB" not in page
        assert driver.execute_script("return window.shifts") < SHIFT_MAX

    with running_store("--capacity=1MiB", f"--http={http}"):
        wait_for_state(driver, "live")
        assert "restarted" in text(driver, "#state") and value(driver, "lookups") == "0"


def abandoned_state(store: RunningStore, domain: str, tokens: str) -> None:
    """Leave the state at the end of ``tokens`` in the store and nothing below it."""
    key = store_pb2.Key(rank=0, group=1, block_hash=chain(tokens)[-1])
    want = store_pb2.Want(key=key, nbytes=256)
    request = store_pb2.ReserveRequest(domain_id=domain, publication_id="gone", wants=[want])
    (grant,) = store.catalog.Reserve(request).grants
    written = [store_pb2.Written(key=key, token=grant.token, checksum=1)]
    store.catalog.Commit(
        store_pb2.CommitRequest(domain_id=domain, publication_id="gone", rank=0, written=written)
    )
    store.catalog.Abandon(store_pb2.AbandonRequest(publication_id="gone"))


def announce(store: RunningStore, domain: str, tokens: str) -> None:
    """Promise the checkpoint at the end of ``tokens``."""
    boundary, name = len(tokens) * GRID, chain(tokens)[-1]
    store.catalog.Announce(
        store_pb2.AnnounceRequest(domain_id=domain, boundary=boundary, block_hash=name, ttl_s=60)
    )


def test_every_reason_tag_and_kind_has_its_place(driver: webdriver.Chrome) -> None:
    with running_store("--capacity=1MiB") as store:
        domain, other = store.open("page"), store.open("other")
        for letter in "ABCDEFGHIJKL":  # more than the pool holds
            store.publish(domain, letter, nbytes=100 << 10)
        store.publish(other, "o")
        store.publish(domain, "a")
        store.publish(domain, "abcd")
        abandoned_state(store, domain, "pq")
        announce(store, domain, "uv")
        for tokens in ("A", "o", "abcx", "pqr", "uvw"):
            store.lookup(domain, tokens)
        each = store.open("kinds")
        for letter, kind in zip("vwxyz", KINDS, strict=True):
            store.publish(each, letter, kind)
        open_page(driver, store)
        status = httpx.get(f"http://{store.http}/status.json").json()
        reasons = dict.fromkeys(STORE["unconsumable"].labels[0].values, 1)
        assert set(ADVICE) == set(reasons)
        assert status["not_consumable"] == reasons, "each was met once"
        for name in reasons:
            assert value(driver, name) == "1"
            bar = driver.find_element(By.CSS_SELECTOR, f'[data-bar="{name}"]')
            whole = driver.find_element(By.CSS_SELECTOR, "#reasons i").size["width"]
            assert bar.size["width"] == pytest.approx(whole / len(reasons), abs=2)
        assert len(text(driver, "#advice")) > 40
        for tag, count in status["candidates"].items():
            assert value(driver, f"candidates.{tag}") == str(count)
        shown = [value(driver, f"candidates.{tag}") for tag in STORE["candidates"].labels[0].values]
        assert shown == ["7", "3", "2", "1"]
        heads = texts(driver, ".domains th")
        assert heads[2:-3] == [kind.replace("_", " ") for kind in KINDS]
        cells, width = texts(driver, "#domains td"), len(heads)
        start = cells.index(each[:8])
        row = cells[start : start + width]
        assert row[2:-2] == ["1"] * len(KINDS) + [str(len(KINDS))]
        assert driver.execute_script("return window.shifts") < SHIFT_MAX


@pytest.mark.parametrize("width", [500, 1200])
def test_nothing_is_wider_than_the_window(
    driver: webdriver.Chrome, width: int, live_page: RunningStore
) -> None:
    open_page(driver, live_page, width)
    assert driver.execute_script(
        "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    sizes = driver.execute_script(
        "return [...document.querySelectorAll('main *')].map(e => parseFloat("
        "getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_colour_schemes(
    driver: webdriver.Chrome, scheme: str, live_page: RunningStore
) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        open_page(driver, live_page)
        for selector, ground in (("h1", "body"), ("h2", "section"), (".note", "section")):
            colour, behind = (
                driver.find_element(By.CSS_SELECTOR, one).value_of_css_property(name)
                for one, name in ((selector, "color"), (ground, "background-color"))
            )
            assert contrast(colour, behind) >= 4.5, (selector, colour, behind)
        dark = (
            luminance(
                driver.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
            )
            < 0.2
        )
        assert dark == (scheme == "dark")
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_page_asks_nobody_else_and_runs_nothing_foreign(live_page: RunningStore) -> None:
    page = httpx.get(f"http://{live_page.http}/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for path in ("", "status.css", "status.js"):
        assert not re.search(
            r"https?:|//\w",
            re.sub(r"(?m)^\s*//.*$", "", httpx.get(f"http://{live_page.http}/{path}").text),
        )
    status = httpx.get(f"http://{live_page.http}/status.json")
    assert status.headers["cache-control"] == "no-store"
    assert status.json()["store_uri"] == live_page.uri


@pytest.fixture(scope="module")
def live_page() -> Any:
    with running_store() as store:
        domain = store.open("wide", "decode-0:worker")
        store.publish(domain, "abc", "decode_end", "input_end", "prompt_end", "shared_prefix")
        store.lookup(domain, "abd")
        yield store


def luminance(colour: str) -> float:
    """Relative luminance of a CSS rgb() colour, as WCAG defines it."""
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours, 1 to 21."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)
