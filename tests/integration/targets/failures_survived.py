"""Allocations that fail with an exception: the program goes on, and so do the books.

python failures_survived.py extension.so out.pickle
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import mlx.core as mx  # noqa: E402
from books import Books  # noqa: E402
from test_extension import Extension  # noqa: E402

import mlxmem  # noqa: E402
from mlxmem import _oom, recorder  # noqa: E402

extension = Extension(Path(sys.argv[1]))
out = Path(sys.argv[2])
extension.note_malloc()
if not extension.prepare_failures():
    print("MLX's malloc takes no lock through an import slot")
    sys.exit(77)


def leaf() -> None:
    mx.array([1.0] * 1000)


def inside_an_op() -> None:
    mx.eval(x @ x)


def fail(work: Callable[[], None]) -> str | None:
    extension.fail_malloc()
    try:
        work()
    except BaseException as error:
        return str(error)
    return None


x = mx.random.normal((50, 50))
mx.eval(x)
if None in (expected := [fail(leaf), fail(inside_an_op)]):
    print("MLX's malloc did not fail")
    sys.exit(77)

with Books() as books:
    # GIVEN a session that does not dump by itself
    # WHEN an allocation fails
    assert fail(leaf) == expected[0]

    # THEN it is noted, and appears in what is read later
    (oom,) = recorder.recording().ooms
    assert (oom.size, oom.primitive_id, oom.stream) == (4000, 0, -1)
    assert oom.mark.name == expected[0]
    assert oom.mark.at == mlxmem.stats()["events_recorded"]
    assert oom.active == mx.get_active_memory()
    assert not out.exists()

    # GIVEN one that dumps
    mlxmem.enable(0, dump_on_oom=out)
    books.resets.clear()
    assert _oom.ooms() == []
    stamps = set()
    for n in range(1, 4):
        # WHEN allocations fail one after the other
        assert [fail(leaf), fail(inside_an_op)] == expected

        # THEN each time the file is written anew, with all of them
        snapshot = pickle.loads(out.read_bytes())
        ooms = [e for e in snapshot["device_traces"][0] if e["action"] == "oom"]
        assert [e["size"] for e in ooms] == [4000, 10_000] * n
        assert ooms[-1]["frames"][0]["name"] == "inside_an_op"
        assert ooms[-2]["frames"][0]["name"] == "leaf"
        extra = snapshot["mlxmem"]["ooms"][-1]
        assert (extra["primitive"], extra["name"]) == ("Matmul", expected[1])
        stamps.add(out.stat().st_mtime_ns)
        leaf()
        inside_an_op()
        books.check()
    assert len(stamps) == 3

    # GIVEN one that can't be written any more
    out.unlink()
    out.mkdir()

    # WHEN an allocation fails, THEN the program sees its exception all the same
    assert fail(leaf) == expected[0]
    out.rmdir()

    # GIVEN more failures than are kept
    for _ in range(100):
        fail(leaf)

    # THEN the last 64 are there
    assert len(_oom.ooms()) == 64
    books.check()

    # WHEN the session is over, THEN nothing is noted or written
    mlxmem.disable()
    out.unlink()
    assert fail(leaf) == expected[0]
    assert len(_oom.ooms()) == 64
    assert not out.exists()
