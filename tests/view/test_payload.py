"""What goes into the page: every number, and nothing that could run."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import numpy as np
import pytest
from histories import BEGIN_US, DATA, MIB, MODEL, Story, busy

from mlxmem.reports.history import Frame, History, Mark
from mlxmem.view import render
from mlxmem.view.payload import describe

_TYPES = {"u8": "u1", "u16": "u2", "u32": "u4", "i8": "i1", "i16": "i2", "i32": "i4"}


def columns_of(history: History) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Unpack the columns as the page does."""
    description, packed = describe(history)
    data = zlib.decompress(packed)
    columns = {}
    at = 0
    for column in json.loads(json.dumps(description))["columns"]:
        dtype = np.dtype("<" + _TYPES.get(column["type"], "f8"))
        end = at + dtype.itemsize * column["count"]
        values = np.frombuffer(data[at:end], dtype).astype(np.int64)
        columns[column["name"]] = (
            np.cumsum(values) if column["delta"] else values
        ).tolist()
        at = end
    assert at == len(data)
    return description, columns


def test_every_block_is_in_the_page_as_it_was() -> None:
    story = Story()
    story.before(5 * MIB)
    first = story.alloc(3 * MIB, MODEL, primitive="Matmul", thread=4711)
    story.alloc(2**40 + 1, DATA, requested=2**40, primitive="Add", stream=1)
    story.free(first)

    description, columns = columns_of(story.history())

    assert columns["start"] == [-1, 0, 1]
    assert columns["life"] == [4, 2, 2]
    assert columns["size"] == [5 * MIB, 3 * MIB, 2**40 + 1]
    assert columns["slack"] == [0, 0, 1]
    assert columns["time"] == [0, 1000, 2000]
    addresses = [columns["addresses"][place] for place in columns["address"]]
    assert addresses == [block["addr"] for block in story.blocks]
    lines = description["keys"]["line"]
    labels = [lines["labels"][lines["ofStack"][place]] for place in columns["stack"]]
    assert labels[1:] == ["/app/model.py:12 Block.__call__", "/app/data.py:7 batches"]
    primitives = description["keys"]["primitive"]["labels"]
    names = [primitives[place] for place in columns["by primitive"]]
    assert names == ["unknown", "Matmul", "Add"]
    assert description["peak"] == 8 * MIB + 2**40 + 1
    assert description["peakAt"] == 1


def test_columns_of_many_random_blocks_come_back_exactly() -> None:
    history = busy(10_000)

    _, columns = columns_of(history)

    blocks = history.blocks
    assert columns["start"] == blocks["start"].tolist()
    assert columns["size"] == blocks["size"].tolist()
    assert columns["time"] == (history.time_us - history.time_us[0]).tolist()
    assert columns["reserved"] == (history.reserved - history.start_reserved).tolist()
    assert [columns["addresses"][i] for i in columns["address"]] == blocks[
        "addr"
    ].tolist()


def test_a_clock_that_steps_back_does_not_move_the_axis_back() -> None:
    story = Story()
    for _ in range(3):
        story.alloc(MIB)
    history = story.history(time_us=np.array([1000, 3000, 2000], np.int64))

    _, columns = columns_of(history)

    assert columns["time"] == [0, 2000, 2000]


def test_a_crossing_has_the_stack_of_its_block() -> None:
    story = Story()
    story.alloc(MIB)
    mark = Mark("over", 1, BEGIN_US + 7, 4711)

    description, _ = columns_of(story.history(crossings=[mark]))

    (crossing,) = description["crossings"]
    stack = crossing.pop("stack")
    assert crossing == {"name": "over", "at": 1, "us": 7, "thread": 4711}
    assert description["frames"][stack[0]] == MODEL[0]
    assert stack in description["stacks"]


def test_a_history_without_entries_or_blocks_has_a_page() -> None:
    assert "</html>" in render(Story().history())


def test_names_are_data_and_never_markup() -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    story = Story()
    story.alloc(MIB, (Frame(f"/{evil}.py", 1, evil),), primitive=evil, range=evil)

    page = render(story.history(name=evil, settings={evil: evil}))

    assert "<img" not in page.split("</title>")[0]
    own = page[page.index('id="description"') :]
    assert "<img src=x" not in own[: own.index("</script>")]
    assert page.count(evil) == 0


def test_the_page_names_nothing_to_load() -> None:
    page = render(Story().history())

    head = page[: page.index("<style>")]
    assert re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="([^"]*)"', page) == [
        "data:,"
    ]
    assert "default-src 'none'" in head
    assert "connect-src" not in head


def test_scripts_do_not_end_early() -> None:
    page = render(Story().history())

    assert page.count("<script") - page.count("</script>") == page.count("&lt;script")


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--by must be one of line, .*, not 'colour'"):
        render(Story().history(), "colour")
