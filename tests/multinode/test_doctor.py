"""`ppfleetx doctor` on two nodes: without faults, with an unreachable first node, and with faults of one
node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import NANO, ROOT, environment
from tests.helpers import programs
from tests.multinode.nodes import Node, finish

MASTER_PORT = 38531


def doctor(
    node: Node, master: Node, *words: str, timeout: int = 90, before: str = "", **environ: str
) -> subprocess.Popen:
    """Start doctor on a node. ``before`` runs first, in a private mount namespace."""
    given = ["--nproc", "1", "--nnodes", "2", "--master", f"{master.address}:{MASTER_PORT}", "--json"]
    command = [sys.executable, "-m", "ppfleetx", "doctor", *given, "--timeout", str(timeout), *words]
    popen = programs.Popen
    if before:
        command = ["unshare", "-m", "sh", "-ec", f'{before}\nexec "$@"', "sh", *command]
        popen = subprocess.Popen
    return popen(
        node.command(*command),
        stdout=subprocess.PIPE,
        text=True,
        env={**environment(), "POD_IP": node.address, **environ},
        cwd=ROOT,
        start_new_session=True,
    )


def reports(
    jobs: list[subprocess.Popen], seconds: float
) -> list[tuple[int, dict[tuple[str, str], list[dict]]]]:
    """(exit code, rows by group and name) of each job, after all processes have ended."""
    found = []
    for code, text in finish(jobs, seconds):
        assert text.startswith("{"), text
        rows: dict[tuple[str, str], list[dict]] = {}
        for row in json.loads(text)["rows"]:
            rows.setdefault((row["group"], row["name"]), []).append(row)
        found.append((code, rows))
    return found


def run_words(corpus: Path, output: Path, *overrides: str) -> list[str]:
    given = [f"Data.{mode}.dataset.input_dir={corpus}" for mode in ("Train", "Eval")]
    given += [f"Engine.save_load.output_dir={output}", *overrides]
    return ["-c", str(NANO), *(word for override in given for word in ("-o", override))]


def failures(rows: dict[tuple[str, str], list[dict]]) -> dict[tuple[str, str], dict]:
    return {key: row for key, those in rows.items() for row in those if row["status"] == "fail"}


def test_two_nodes_are_ready(corpus: Path, tmp_path: Path, nodes) -> None:
    words = run_words(corpus, tmp_path / "output", "Distributed.mp_degree=2")
    jobs = [doctor(node, nodes[0], *words) for node in nodes]
    for code, rows in reports(jobs, 240):
        assert failures(rows) == {} and code == 0
        assert {row["status"] for row in rows["nodes", "links"]} == {"ok"}
        assert "joined: job, mp" in rows["collectives", "process groups"][0]["found"]
        assert rows["collectives", "all_reduce (mp)"][0]["numbers"]["bytes_per_second_4194304"] > 0
        assert rows["agreement", "shared directory"][0]["status"] == "ok"
        assert rows["agreement", "versions"][0]["status"] == "ok"


def test_a_first_node_that_nothing_gets_through_to_is_named_before_anything_starts(nodes) -> None:
    first, second = nodes
    nowhere = ["lladdr", "02:00:00:00:00:01", "dev", second.cable, "nud", "permanent"]  # nobody's address
    subprocess.run(second.command("ip", "neigh", "replace", first.address, *nowhere), check=True)
    jobs = [doctor(node, first, timeout=4) for node in nodes]
    (code, at_first), (other_code, at_second) = reports(jobs, 60)
    assert code == other_code == 1
    assert "1 of 1 others did not connect" in failures(at_first)["nodes", "--master"]["found"]
    blocked = failures(at_second)["nodes", "--master"]
    where = f"the first machine at {first.address}:{MASTER_PORT}"
    assert f"no connection to {where} within 4 s: nothing comes back" in blocked["found"]
    assert "firewall" in blocked["cure"]
    assert {group for group, _ in at_second} == {"nodes"}


def test_an_interface_that_is_down_is_named(nodes) -> None:
    first, second = nodes
    second.unplug()
    jobs = [doctor(node, first, timeout=3) for node in nodes]
    (_, _), (code, rows) = reports(jobs, 60)
    assert code == 1 and "cannot be reached" in failures(rows)["nodes", "--master"]["found"]
    assert any(f"{second.cable} 10.77.0.2 (down)" in row["found"] for row in rows["nodes", "interfaces"])


@pytest.mark.slow
def test_faults_of_one_node_are_all_named(corpus: Path, tmp_path: Path, nodes) -> None:
    output, empty = tmp_path / "output", tmp_path / "empty"
    output.mkdir()
    other = tmp_path / "__init__.py"
    package = ROOT / "ppfleetx/__init__.py"
    other.write_text(package.read_text().replace('__version__ = "', '__version__ = "9.'))
    empty.mkdir()
    mounts = [
        f"mount --bind {empty} {corpus.parent}",  # the data is not there
        f"mount -t tmpfs -o size=1m none {output}",  # the disk is full, and not the shared one
        f"mount --bind {other} {package}",  # another version of ppfleetx
    ]
    words = run_words(corpus, output, "Distributed.dp_degree=2")
    jobs = [
        doctor(nodes[0], nodes[0], *words),
        doctor(
            nodes[1],
            nodes[0],
            *words,
            "-o",
            "Global.seed=7",
            before="\n".join(mounts),
            NCCL_SOCKET_IFNAME="bond0",
        ),
    ]
    for code, rows in reports(jobs, 240):
        failed = failures(rows)
        assert code == 1
        assert failed["files", "Data.Train"]["ranks"] == [1]
        assert "toy" in failed["files", "Data.Train"]["found"]
        assert "No space left" in failed["storage", "output directory"]["found"]
        assert "not one fits" in failed["storage", "room"]["found"]
        assert failed["agreement", "shared directory"]["found"].startswith("rank 1: ")
        assert "on rank 0, 9." in failed["agreement", "versions"]["found"]
        assert "Global.seed is 1024 on rank 0, 7 on rank 1" in failed["agreement", "configuration"]["found"]
        assert "no such interface" in failed["network", "NCCL_SOCKET_IFNAME"]["found"]
        assert failed["network", "NCCL_SOCKET_IFNAME"]["ranks"] == [1]
        assert rows["collectives", "collectives"][0]["status"] == "skipped"
