"""Paddle's launcher gives up waiting for other nodes, and ends with conventional exit codes."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppfleetx.utils import cpu_launcher
from ppfleetx.utils.lost_peers import START_VARIABLE
from tests.helpers import programs
from tests.helpers.ranks import free_port
from tests.helpers.waiting import wait_for

LAUNCHER = Path(__file__).with_name("launcher.py")
PROGRAM = """
import os, pathlib, signal, sys, time
def save(*_):
    for part in ("saving", "saved"):
        time.sleep(1)
        print(part, os.environ["PADDLE_TRAINER_ID"])
    sys.exit(0)
if sys.argv[1] == "saves":
    signal.signal(signal.SIGTERM, save)
    print("training")
pathlib.Path(sys.argv[2], "ready." + os.environ["PADDLE_TRAINER_ID"]).touch()
if sys.argv[1] == "killed" and os.environ["PADDLE_TRAINER_ID"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0 if sys.argv[1] == "ends" else 60)
"""


@pytest.fixture
def launch(tmp_path: Path):
    """``launch(*options, does="ends")``: a launcher on this machine, and what its ranks do."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def start(*options: str, does: str = "ends", **environ: str) -> programs.Popen:
        command = [sys.executable, str(LAUNCHER), "--log_dir", str(tmp_path / "log"), "--host", "127.0.0.1"]
        return programs.Popen(
            [*command, *options, str(program), does, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environ},
            cwd=tmp_path,
        )

    return start


def two_nodes(port: int, host: str = "127.0.0.1") -> list[str]:
    return ["--nproc_per_node", "1", "--nnodes", "2", "--master", f"{host}:{port}"]


def ended(process: programs.Popen, within: float = 40) -> tuple[int, str]:
    try:
        output = process.communicate(timeout=within)[0]
    finally:
        process.kill()
    return process.returncode, output


class _Answering(http.server.BaseHTTPRequestHandler):
    """A web server, or the store of a launcher whose two nodes have come."""

    entries: dict[str, str] | None = None

    def do_GET(self) -> None:
        entries = {"/healthy": "ok", **self.entries} if self.entries else {}
        found = {key: value for key, value in entries.items() if key.startswith(self.path)}
        content = json.dumps(found).encode() if found else b"<html>Welcome!</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def program_at(port: int, kind: str, host: str = "127.0.0.1") -> Iterator[None]:
    """Another program that has the port."""
    if kind in ("web", "launcher"):
        info = {f"/default/info/{name}/-1": json.dumps({"name": name}) for name in ("aaaaaa", "other")}
        handler = type("Handler", (_Answering,), {"entries": info if kind == "launcher" else None})
        server = http.server.ThreadingHTTPServer((host, port), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
        return
    with socket.socket() as held:
        held.bind((host, port))
        if kind == "silent":
            held.listen()
        yield


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("silent", "another program holds the port"),
        ("bound", "another program holds the port"),
        ("web", "another program holds the port"),
        ("launcher", "another job with the same --job_id runs there"),
    ],
)
def test_a_master_port_in_use_is_refused(launch, kind: str, why: str) -> None:
    port = free_port()
    with program_at(port, kind):
        code, output = ended(launch(*two_nodes(port)))
    assert code == 2, output
    assert f"error: --master 127.0.0.1:{port}: {why}. Give all nodes another free port" in output


@pytest.mark.parametrize(
    ("host", "limit", "words"),
    [
        ("127.0.0.1", "4", ["error: after 4 s 1 of 2 nodes have come to 127.0.0.1:PORT (127.0.0.1)"]),
        ("127.0.0.2", "1", ["no launcher answers at 127.0.0.2:PORT", "give --host 127.0.0.2"]),
    ],
)
def test_the_wait_for_another_node_ends(launch, host: str, limit: str, words: list[str]) -> None:
    port = free_port()
    code, output = ended(launch(*two_nodes(port, host), **{START_VARIABLE: limit}))
    assert code == 3, output
    for text in (*words, START_VARIABLE):
        assert text.replace("PORT", str(port)) in output


@pytest.mark.parametrize("master", ["127.0.0.1", "127.0.0.1:99999", "127.0.0.1:0"])
def test_a_master_without_a_port_is_refused(launch, master: str) -> None:
    code, output = ended(launch("--nnodes", "2", "--master", master))
    assert code == 2
    assert output.startswith(f"error: --master {master}: not HOST:PORT") and output.count("\n") == 1


@pytest.mark.parametrize("nodes", ["two", "0", "1.5"])
def test_a_wrong_number_of_nodes_is_refused(launch, nodes: str) -> None:
    code, output = ended(launch("--nnodes", nodes, "--master", "127.0.0.1:8000"))
    assert code == 2
    assert output.startswith(f"error: --nnodes {nodes}: not the number") and output.count("\n") == 1


def test_nodes_that_meet_are_left_alone(launch) -> None:
    port = free_port()
    jobs = [launch(*two_nodes(port), "--rank", str(number), **{START_VARIABLE: "30"}) for number in range(2)]
    for code, output in map(ended, jobs):
        assert code == 0, output
        assert "error:" not in output


@pytest.mark.parametrize(
    ("does", "number", "usual"),
    [
        ("saves", signal.SIGINT, 0),
        ("saves", signal.SIGTERM, 0),
        ("sleeps", signal.SIGINT, 130),
        ("sleeps", signal.SIGTERM, 143),
        ("killed", None, 137),
    ],
)
def test_exit_codes_are_the_usual_ones(launch, tmp_path, does: str, number: int | None, usual: int) -> None:
    job = launch("--nproc_per_node", "2", does=does)
    if number is not None:
        wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 2, running=[job])
        job.send_signal(number)
    code, output = ended(job)
    assert code == usual, output
    if does == "saves":
        lines = [line for line in output.splitlines() if line in ("training", "saving 0", "saved 0")]
        assert lines == ["training", "saving 0", "saved 0"], output


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ([3, 0, 3], 3),
        ([-9, 3], -9),  # killed from outside
        ([-15, 1], 1),  # ended by the launcher, because of the other
        ([-15, None], -15),
        ([-9, 4], 4),  # a rank that was stopped, and the one that says so
        ([3, 5, 3], 5),
        ([0, None], 0),
    ],
)
def test_the_rank_that_says_most_decides_the_exit_code(codes, told):
    assert cpu_launcher._most_telling_code(codes) == told
