"""The progress bar, on a pseudo-terminal of 80 columns."""

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from types import ModuleType, SimpleNamespace

import pytest

from ppfleetx.utils.log import configure_logging
from ppfleetx.utils.progress_bar import ProgressBar, track


@contextlib.contextmanager
def terminal():
    """Standard output and errors are a terminal within; gives what was drawn, afterwards."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    drawn = bytearray()

    def read():
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(master, 1 << 16):
                drawn.extend(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with (
        os.fdopen(slave, "w") as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        yield drawn
    reader.join(timeout=10)
    os.close(master)


def test_log_lines_longer_than_the_terminal_is_wide_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    logger = configure_logging()
    line = "global step 1, " + ", ".join(f"number {i}: {i / 7:.9f}" for i in range(12))
    assert len(line) > 240
    with terminal() as drawn:
        stdout = sys.stdout
        with ProgressBar("training", total=3, unit="step", show=True) as bar:
            assert sys.stdout is not stdout and sys.stdout.isatty()
            bar.advance(1, "loss 3.5")
            logger.info(line)
            print("two", "words", sep="\n")
            print("no end", end="")
        assert sys.stdout is stdout
    lines = drawn.decode().replace("\x1b[2K", "").split("\r\n")
    assert [text for text in lines if text.endswith(f"] - {line}")], "the line stands there whole"
    assert [text.rpartition("\r")[2] for text in lines if text.endswith(("two", "words", "no end"))] == [
        "two",
        "words",
        "no end",
    ]
    assert "training" in lines[0] and "loss 3.5" in "".join(lines)


def test_without_a_terminal_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    stdout = sys.stdout
    with ProgressBar("training", total=3, unit="step") as bar:
        assert sys.stdout is stdout
        bar.advance(1)
        print("line")
    assert capsys.readouterr() == ("line\n", "")


def test_a_notebook_has_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a real kernel: docs/notebooks, which `make docs-test` executes."""
    drawn: list[list[str]] = []

    class Handle:
        def update(self, bundle: dict, *, raw: bool) -> None:
            assert raw
            drawn[-1].append(bundle["text/plain"])

    def display(bundle: dict, *, raw: bool, display_id: bool) -> Handle:
        assert raw and display_id
        drawn.append([bundle["text/plain"]])
        return Handle()

    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    ipython.display = ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    assert list(track("abcd", "counting", total=4, unit="letter")) == list("abcd")
    with ProgressBar("silent", total=1, unit="x", show=False) as bar:
        bar.advance(1)
    (lines,) = drawn
    assert lines[0].startswith("counting: 0%, 0/4 letter")
    assert lines[-1].startswith("counting: 100%, 4/4 letter, ")


def test_a_bar_on_a_terminal_that_is_gone_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    stream = os.fdopen(slave, "w")
    with contextlib.redirect_stderr(stream), ProgressBar("training", total=3, unit="step", show=True) as bar:
        os.close(master)
        bar.advance(1)
    with contextlib.suppress(OSError):
        stream.close()
