"""The recording of a program under `mlxmem run`, from mlx.core's import to its end."""

from __future__ import annotations

import _thread
import contextlib
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from mlxmem import _oom, _termination, distributed, dump_file, recorder
from mlxmem._deferred_signals import deferred
from mlxmem.errors import UnsupportedMLXError
from mlxmem.units import format_bytes


class RunSession:
    """One process's recording and its file.

    Parameters
    ----------
    options : mapping of str to str
        As `mlxmem.commands.run` describes them.
    startup_pid : int
        The process in which the interpreter started; another one was forked from it.
    """

    def __init__(self, options: Mapping[str, str], startup_pid: int) -> None:
        self.options = options
        self.startup_pid = startup_pid
        self.number = 0  # of the recorder's session
        self.recording = False  # when the process forked
        self._become()

    def _become(self) -> None:
        """Be the session of the process that this is now."""
        self.pid = os.getpid()
        self.name = self.options["out"]
        if self.pid != int(self.options["pid"]):
            stem, suffix = os.path.splitext(self.name)
            self.name = f"{stem}.{self.pid}{suffix}"
        folder = self.options["folder"]
        self.rank = distributed.current()
        if self.rank and dump_file.is_plain(os.path.join(folder, self.name)):
            self.name = distributed.with_rank(self.name, self.rank)
        self.path = os.path.join(folder, self.name)
        self.done = False
        self.lock = _thread.allocate_lock()

    def start(self) -> None:
        """Start to record, and see to it that a dump is written whatever happens."""
        recorder.enable(
            int(self.options["max_entries"]),
            stacks="no_stacks" not in self.options,
        )
        # Not the session's: it stays when the program begins one of its own.
        _oom.always_dump_on_failure(self.path, recorder.dump)
        self.number = recorder.session_number()
        if self.pid != self.startup_pid:
            self._end_with_multiprocessing()
        if _termination.catch():
            # Not a Thread: the program's threading.enumerate() has its own alone.
            _thread.start_new_thread(self._await_termination, ())

    def follow_forks(self) -> None:
        """Record forked children, too."""
        os.register_at_fork(before=self._before_fork, after_in_child=self._after_fork)

    def finish(self) -> None:
        """Write the dump and say so; once in each process."""
        if os.getpid() != self.pid:
            return  # a forked child that is not followed
        shown = shlex.quote(self.name)
        still = f"still writing {shown}; Ctrl-C again leaves it unwritten"
        try:
            with deferred(lambda: self.say(still)), self.lock:
                if self.done:
                    return
                self.done = True
                self._write(shown)
        except KeyboardInterrupt:
            # Perhaps of another thread, which dies with this one.
            dump_file.remove_partial(self.path)
            self.say(f"interrupted; {shown} was not written")
        finally:
            _termination.release()

    def say(self, text: str) -> None:
        """Write a line to stderr, unless the user wants none."""
        if "quiet" in self.options or sys.__stderr__ is None:
            return
        # RuntimeError: a signal handler that interrupted another write.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            rank = f"{self.rank}: " if self.rank else ""
            sys.__stderr__.write(f"mlxmem: {rank}{text}\n")
            sys.__stderr__.flush()

    def _write(self, shown: str) -> None:
        try:
            stats = recorder.stats()
            recorder.dump(self.path)
        except Exception as error:
            # The program's exit code is its own.
            self.say(f"{shown} was not written: {error or type(error).__name__}")
            return
        events, dropped = stats["events_recorded"], stats["events_dropped"]
        text = f"{events:,} events, peak {format_bytes(stats['peak'])}"
        if dropped:
            text += f"; the first {dropped:,} were dropped, --unlimited keeps all"
        if recorder.session_number() != self.number:
            text += "; the program began the recording anew with mlxmem.enable()"
        self.say(f"{text}. Next: mlxmem summary {shown}")

    def _await_termination(self) -> None:
        number = _termination.wait()
        try:
            _thread.start_new_thread(self._finish_and_die, (number,))
        except RuntimeError:  # none are started any more when Python ends
            self._finish_and_die(number)
        _termination.wait()
        # Whoever asks again does not want to wait for the file.
        dump_file.remove_partial(self.path)
        self._die(number)

    def _finish_and_die(self, number: int) -> None:
        try:
            self.finish()
        finally:
            self._die(number)

    def _die(self, number: int) -> None:
        _termination.release()
        os.kill(os.getpid(), number)

    def _before_fork(self) -> None:
        self.recording = os.getpid() == self.pid and recorder.is_enabled()

    def _after_fork(self) -> None:
        if not self.recording:
            return
        self._become()
        try:
            self.start()
        except Exception as error:
            self.done = True
            self.say(f"not recording process {self.pid}: {error}")

    def _end_with_multiprocessing(self) -> None:
        # Its forked children end in os._exit, which calls nothing but its own list.
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            self._register(util)
            # It empties that list in a new child, and calls this then.
            util.register_after_fork(self, lambda _: self._register(util))

    def _register(self, util: Any) -> None:
        util.Finalize(None, self.finish, exitpriority=-(10**6))


def begin(options: Mapping[str, str], startup_pid: int) -> RunSession | None:
    """Begin to record this process; None where its MLX is not supported."""
    session = RunSession(options, startup_pid)
    try:
        session.start()
    except UnsupportedMLXError as error:
        session.say(f"not recording: {error}")
        session.done = True
        return session
    if "follow" in options:
        session.follow_forks()
    return session
