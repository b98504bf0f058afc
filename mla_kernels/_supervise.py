# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Runs one command and ends it, with everything it started, as soon as the caller is gone.

Started as ``python -P -S _supervise.py CALLER_PID COMMAND...`` with the read end of a pipe as standard input; only the
caller holds the write end. Linux only: it needs /proc and prctl.

Guaranteed: when the caller closes the pipe, ends in any way (SIGKILL included) or sends SIGTERM, every descendant is
killed within moments, also those in process groups and sessions of their own: this process is their subreaper.
Not guaranteed: if this process itself gets SIGKILL, the command dies with it (PR_SET_PDEATHSIG), but a compiler that
the command had started runs on until it has finished its one file.
When the command ends by itself, what it left running on purpose (a compiler server, say) is left alone.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STOPPED = 143  # exit code when the caller went away: 128 + SIGTERM


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _descendants() -> list[int]:
    """Living descendants of this process, zombies left out."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(name))
    found, todo = [], [os.getpid()]
    while todo:
        for pid in children.get(todo.pop(), []):
            found.append(pid)
            todo.append(pid)
    return found


def _reap(command: int) -> int | None:
    """Collect ended children; the wait status of `command` if it is among them."""
    status = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == command:
            status = code


def _kill_all(command: int) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        alive = _descendants()
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(command)
        time.sleep(0.01)


def main(caller: int, command: list[str]) -> int:
    stop: list[int] = []
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _: stop.append(n))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != caller:
        return STOPPED
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            if os.getppid() == own:
                os.execv(command[0], command)
        except OSError as error:
            os.write(2, f"error: cannot start {os.fsencode(command[0])!r}: {error.strerror}\n".encode())
        os._exit(127)
    while True:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
        status = _reap(pid)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if stop or (0 in ready and not os.read(0, 1)):
            _kill_all(pid)
            return STOPPED


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
