"""Take a picture of the page that `mlxmem view` makes.

    python scripts/picture_of_view.py out.pickle docs/images/view.png

Needs playwright (from PyPI) and a Chromium on the PATH.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shutil
import tempfile

from playwright.sync_api import sync_playwright

from mlxmem.reports import history
from mlxmem.view import render

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
WIDTH, HEIGHT = 1400, 1180  # pixels
_TIP = """([x, y]) => {
    const { xaxis, yaxis } = document.getElementById('chart')._fullLayout;
    return [xaxis._offset + x * xaxis._length, yaxis._offset + y * yaxis._length];
}"""


def take(recording: pathlib.Path, picture: pathlib.Path) -> None:
    """Draw the page of a recording, with the pointer on the lowest area.

    Raises
    ------
    SystemExit
        No Chromium was found.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise SystemExit(f"no Chromium found, looked for {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = pathlib.Path(folder, "page.html")
        file.write_text(render(_anywhere(history.read(recording))), "utf-8")
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        left, top = page.evaluate(_TIP, [0.27, 0.92])
        box = page.locator("#chart").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + left, box["y"] + top)
        page.wait_for_timeout(300)
        page.screenshot(path=picture)
        browser.close()


def _anywhere(recorded: history.History) -> history.History:
    """Leave out the folders that are this machine's own."""
    stacks = [
        tuple(frame._replace(filename=_tail(frame.filename)) for frame in stack)
        for stack in recorded.stacks
    ]
    name = pathlib.PurePath(recorded.name).name
    return dataclasses.replace(recorded, name=name, stacks=stacks)


def _tail(filename: str) -> str:
    _, packages, tail = filename.rpartition("site-packages/")
    return tail if packages else pathlib.PurePath(filename).name


def main() -> None:
    """Read the arguments and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recording", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path)
    arguments = parser.parse_args()
    take(arguments.recording, arguments.picture)
    print(f"{arguments.picture}: {arguments.picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
