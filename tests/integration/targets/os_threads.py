"""The end of a thread as the system sees it."""

from __future__ import annotations

import os
import threading
import time


def wait_until_gone(thread: threading.Thread) -> None:
    """Wait until the system's thread has ended, which join() does not.

    MLX destroys what it keeps per thread when the system's thread ends, after Python
    has joined it, and takes the GIL for that. When the interpreter is ending by then,
    MLX 0.32.4 aborts, about one time in six and without mlxmem, too.
    """
    thread.join(timeout=60)
    assert not thread.is_alive()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(0.001)
