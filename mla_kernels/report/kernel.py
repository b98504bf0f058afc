# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The IPython kernel that the runner starts: `python -m mla_kernels.report.kernel LOG -f CONNECTION_FILE`.

It differs from the plain one in two things that a run without a person needs.

1. Output floods are held back where they arise. All text goes to LOG; of each cell the notebook gets the beginning, a
   link to LOG and the end. (Sent on, 300 000 small prints overrun the message queue, and with it the message that says
   that the cell has ended.)
2. An error that was shown is an error. `!false`, `%run` of a failing script and a traceback printed by a hook would
   otherwise leave the cell "ok".
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from html import escape
from pathlib import Path
from typing import Any

from ipykernel.iostream import OutStream
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.display import display
from traitlets import Type

__all__ = ["ReportKernel", "ReportShell", "ReportStream"]

HEAD = 64_000  # characters of a cell's output that go to the notebook at once, a stream
TAIL = 8_000  # characters of its end that follow when the cell is done
LOG_LIMIT = 256 << 20  # bytes of a notebook's text output that are kept in its log
BLOCK = 64_000  # in a flood, characters that are written to the log together,
BLOCK_SECONDS = 0.1  # or what came within this time


class Log:
    """The full text of all cells. Written through at once, so that a crash loses nothing; in a flood, in blocks.

    Of a notebook that writes more than LOG_LIMIT, the log says how much of each cell is left out.
    """

    path: Path | None = None
    trouble: OSError | None = None  # a full disk; fails the cell when it has ended, as the streams must not raise
    _heading = ""
    _handle: int | None = None
    _size = 0  # bytes of text so far
    _dropped = 0  # bytes of this cell that are left out

    @classmethod
    def start_cell(cls, heading: str) -> None:
        cls._heading, cls._dropped = f"\n── {heading}\n", 0

    @classmethod
    def write(cls, text: str) -> None:
        if cls.path is None or not text:
            return
        heading, cls._heading = cls._heading.encode("utf-8", "replace"), ""
        data = text.encode("utf-8", "replace")
        kept = data[: max(LOG_LIMIT - cls._size, 0)]
        dropped = len(data) - len(kept)
        cls._size += len(data)
        if dropped and not cls._dropped:  # said now, since the cell may never end
            kept += f"\n[what follows is left out: the limit of {LOG_LIMIT:,} bytes is reached]\n".encode()
        cls._dropped += dropped
        cls._append(heading + kept)

    @classmethod
    def end_cell(cls) -> None:
        if cls._dropped:
            cls._append(f"[{cls._dropped:,} bytes of this cell are left out]\n".encode())
            cls._dropped = 0

    @classmethod
    def _append(cls, data: bytes) -> None:
        if cls.trouble is not None or cls.path is None:
            return
        try:
            if cls._handle is None:
                cls.path.parent.mkdir(parents=True, exist_ok=True)
                cls._handle = os.open(cls.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            while data:
                data = data[os.write(cls._handle, data) :]
        except OSError as error:
            cls.trouble = OSError(error.errno, error.strerror, str(cls.path))


class ReportStream(OutStream):
    """stdout or stderr of the kernel: everything to the log, head and tail of each cell to the notebook."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.Lock()  # C code's output arrives on a thread of its own
        self.start_cell()
        super().__init__(*args, **kwargs)

    def start_cell(self) -> None:
        self._sent = 0  # characters of this cell that went to the notebook
        self._held = 0  # characters of this cell that did not
        self._tail = ""  # the last of those
        self._block: list[str] = []  # what of those is not in the log yet
        self._block_size, self._block_time = 0, 0.0

    def write(self, string: str) -> int:
        if not isinstance(string, str):
            raise TypeError(f"write() argument must be str, not {type(string)}")
        if not string.isascii():
            string = string.encode("utf-8", "replace").decode()  # lone surrogates are not JSON
        with self._lock:
            head = string[: max(HEAD - self._sent, 0)]
            rest = string[len(head) :]
            if head:
                self._sent += len(head)
                Log.write(head)
                super().write(head)
            if rest:
                self._hold(rest)
        return len(string)

    def _hold(self, text: str) -> None:
        now = time.monotonic()
        if not self._block:
            self._block_time = now
        self._held += len(text)
        self._block.append(text)
        self._block_size += len(text)
        if self._block_size > BLOCK or now - self._block_time > BLOCK_SECONDS:
            self._write_block()

    def _write_block(self) -> None:
        text = "".join(self._block)
        self._block, self._block_size = [], 0
        self._tail = (self._tail + text)[-TAIL:]
        Log.write(text)

    def end_cell(self) -> None:
        """Send the end of what was held back."""
        with self._lock:
            if not self._held:
                return
            self._write_block()
            left_out, tail = self._held - len(self._tail), self._tail
            self.start_cell()
        self.flush()
        log = f"logs/{Log.path.name}" if Log.path else ""
        note = f"{left_out:,} characters of {self.name} are left out here."
        display(
            {
                "text/html": f'<p class="mla-cut">{note} <a href="{escape(log)}">Full log</a></p>',
                "text/plain": f"[{note} Full log: {log}]",
            },
            raw=True,
        )
        super().write(tail)
        self.flush()

    def _watch_pipe_fd(self) -> None:
        """Take what C code and child processes write. (The plain class also echoes it to the terminal, a file here.)"""
        fid: int | None = self._fid
        if fid is None:
            return
        try:
            while (data := os.read(fid, 1 << 16)) and self._should_watch:
                self.write(data.decode(errors="replace"))
        except Exception:
            self._exc = sys.exc_info()


class ReportShell(ZMQInteractiveShell):
    """Shell that remembers an error it has shown."""

    shown: BaseException | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.system_raise_on_error = True  # for `x = !cmd`; older IPython does not know it

    def system(self, cmd: str) -> None:
        """Run `!cmd`; CalledProcessError when it fails."""
        self.system_piped(cmd)
        if code := self.user_ns.get("_exit_code"):
            raise subprocess.CalledProcessError(code, cmd)

    def showtraceback(self, *args: Any, **kwargs: Any) -> None:
        self.shown = sys.exc_info()[1] or self.shown
        super().showtraceback(*args, **kwargs)


class ReportKernel(IPythonKernel):
    """Kernel whose reply says "error" when an error was shown."""

    shell_class = Type(ReportShell)
    shell: ReportShell

    async def do_execute(self, code: str, silent: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        shell = self.shell
        shell.shown = None
        streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, ReportStream)]
        lines = [line for line in code.strip().splitlines() if line.strip()] or [""]
        Log.start_cell(f"In [{shell.execution_count}]: {lines[0][:100]}")
        for stream in streams:
            stream.start_cell()
        reply: dict[str, Any] = await super().do_execute(code, silent, *args, **kwargs)
        for stream in streams:
            stream.end_cell()
        Log.end_cell()
        error = shell.shown or Log.trouble
        if reply["status"] == "ok" and error is not None:
            reply |= {"status": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": []}
        return reply


def main() -> None:
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # put there by -m
    Log.path = Path(sys.argv[1])
    IPKernelApp.launch_instance(
        argv=sys.argv[2:], kernel_class=ReportKernel, outstream_class="mla_kernels.report.kernel.ReportStream"
    )


if __name__ == "__main__":
    # Not as __main__, so that the classes are the same ones that the application imports by name.
    from mla_kernels.report import kernel

    kernel.main()
