"""A headless Chromium that must not complain, nor ask the network for anything."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxmem.reports.history import History
from mlxmem.view import render

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
READY_MS = 60_000

Show = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Return a running Chromium."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install it"
    )
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium found, looked for {', '.join(_NAMES)}")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=program, args=_FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Any, tmp_path: pathlib.Path) -> Iterator[Show]:
    """Return a function that opens a history's page.

    At the end of the test it checks that no page wrote to the console, raised, or
    asked for anything but itself.
    """
    wrong: list[str] = []
    contexts = []

    def opened(history: History, by: str = "line", **options: Any) -> Any:
        file = tmp_path / f"page{len(contexts)}.html"
        file.write_text(render(history, by), "utf-8", "backslashreplace")
        context = browser.new_context(
            viewport={"width": 1400, "height": 950}, **options
        )
        contexts.append(context)
        page = context.new_page()

        def asked(request: Any) -> None:
            if request.url != file.as_uri() and not request.url.startswith("data:"):
                wrong.append(f"request: {request.url}")

        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        page.on("request", asked)
        page.goto(file.as_uri(), wait_until="load")
        page.wait_for_selector("html[data-ready]", state="attached", timeout=READY_MS)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
