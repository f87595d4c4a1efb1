"""Run one case script under recording and write what the tests need.

    python run_case.py case01_loop_without_eval.py out.pickle [max_entries
        [dump [label]]]

The books are checked at the end. What MLX counted at every `snap()` of the case goes
along, so that the test can compare the events up to there; each is a mark of the
recording, too. With a fourth argument the snapshot is dumped, at the `snap()` whose
label begins with the fifth, or at the end.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))
os.environ.pop("MLXMEM_DUMP", None)  # the runner records, the case must not

import _mem  # noqa: E402
from books import Books, settle  # noqa: E402

import mlxmem  # noqa: E402


def main(
    script: str, out: str, max_entries: str = "0", dump: str = "", dump_at: str = ""
) -> None:
    """Record the script, check its books and pickle the recording."""
    marks: list[dict[str, Any]] = []
    books = Books(int(max_entries))
    snap = _mem.snap

    def marked_snap(label: str) -> tuple[int, int, int]:
        shown: tuple[int, int, int] = snap(label)
        counters = settle()
        at = mlxmem.stats()["events_recorded"]
        mlxmem.mark(label)
        if dump_at and label.startswith(dump_at):
            mlxmem.dump(dump)
        marks.append({"label": label, "at": at, **counters._asdict()})
        return shown

    _mem.snap = marked_snap
    path = HERE / script
    sys.argv = [str(path)]
    with books:
        # The globals keep the case's arrays alive until the books are closed.
        keep = runpy.run_path(str(path), run_name="__main__")
        recording = books.check()
        ids = {int(i) for i in recording.events["traceback_id"]}
        values = {
            item.name: getattr(recording, item.name)
            for item in dataclasses.fields(recording)
        }
        # Functions; the stacks themselves follow.
        values["resolve"] = values["context"] = None
        values["nodes"] = None
        values["settings"] = dict(recording.settings)
        values["primitives"] = list(recording.primitives)
        result = {
            "path": str(path),
            "recording": values,
            "stacks": {i: recording.resolve(i) for i in ids},
            "marks": marks,
            "resets": books.resets,
            "main_thread": threading.main_thread().native_id,
        }
        Path(out).write_bytes(pickle.dumps(result))
        if dump and not dump_at:
            mlxmem.dump(dump)
    del keep


if __name__ == "__main__":
    main(*sys.argv[1:])
