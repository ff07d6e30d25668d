"""Simulated machines: network namespaces with their own addresses, joined by a cable (veth)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass


class NoNamespacesError(RuntimeError):
    """This machine, or its user, cannot make network namespaces."""


@dataclass(frozen=True)
class Node:
    """A network namespace, its address, and its end of the cable."""

    name: str
    address: str
    cable: str

    def command(self, *words: str) -> list[str]:
        """The command line that runs ``words`` on this node."""
        return ["ip", "netns", "exec", self.name, *words]

    def unplug(self) -> None:
        """Pull the cable: this node can no longer communicate."""
        _ip("-n", self.name, "link", "set", self.cable, "down")


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes that reach only each other. Raises NoNamespacesError if iproute2 is missing, or the kernel
    refuses."""
    if shutil.which("ip") is None:
        raise NoNamespacesError("there is no `ip` command (iproute2)")
    tag = os.getpid() % 10000
    with _cable() as ends:
        nodes = tuple(
            Node(f"ppfx{tag}{letter}", f"10.77.0.{number}", end)
            for number, (letter, end) in enumerate(zip("ab", ends, strict=True), start=1)
        )
        try:
            for node in nodes:
                _ip("netns", "add", node.name)
                _ip("link", "set", node.cable, "netns", node.name)
                _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", node.cable)
                _ip("-n", node.name, "link", "set", node.cable, "up")
                _ip("-n", node.name, "link", "set", "lo", "up")
            yield nodes
        finally:
            for node in nodes:  # the ends of the cable go with them
                subprocess.run(["ip", "netns", "delete", node.name], capture_output=True, check=False)


@contextlib.contextmanager
def _cable() -> Iterator[tuple[str, str]]:
    tag = os.getpid() % 10000
    ends = (f"ppfx{tag}a", f"ppfx{tag}b")
    _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    try:
        yield ends
    finally:  # still here only where a node could not be made
        subprocess.run(["ip", "link", "delete", ends[0]], capture_output=True, check=False)


def finish(jobs: list[subprocess.Popen], timeout: float) -> list[tuple[int, str]]:
    """(exit code, output) of each job, after all processes have ended."""
    deadline = time.monotonic() + timeout
    try:
        outputs = [job.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for job in jobs]
    finally:
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    return [(job.returncode, output) for job, output in zip(jobs, outputs, strict=True)]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespacesError(f"ip {' '.join(words)}: {done.stderr.strip()}")
