"""A checkpoint with a tiny model, and servers of it as processes of their own."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ppfleetx.commands.generate import load_generator
from ppfleetx.config.loader import load_config
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.generation.generator import Generator
from tests.deploy.exports import GPT2_STYLE, write_run
from tests.goldens.chat_styles import GPT2
from tests.helpers import programs

ROOT = Path(__file__).resolve().parents[3]
# Positions enough that an answer can take longer than any test.
MODEL = {**GPT2_STYLE, "max_position_embeddings": 8192}
TOOLS = "{%- if tools %}{{- tools | tojson }}{%- endif %}"
ENDLESS = {"max_tokens": 8000, "min_tokens": 8000}
KEY = "a-secret-key"
ORIGIN = "https://pages.example"
START_SECONDS = 180.0
METRIC_SECONDS = 30.0


class Server:
    """``tools/serve.py`` in a process; forked unless ``executed``."""

    def __init__(
        self, checkpoint: Path, log: Path, *overrides: str, key: str | None = None, executed: bool = False
    ) -> None:
        self._log = log
        environment = {name: value for name, value in os.environ.items() if name != "PPFLEETX_API_KEY"}
        environment |= {"OMP_NUM_THREADS": "1"} | ({} if key is None else {"PPFLEETX_API_KEY": key})
        with log.open("wb") as output:
            start = subprocess.Popen if executed else programs.Popen
            self.process = start(
                command(checkpoint, "Serve.port=0", *overrides),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self.url = self._wait_for_url()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=60)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def complete(self, **body: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "the cat", **body})

    def together(self, bodies: Sequence[dict]) -> list:
        """What the ``openai`` client returns for all of these requests at the same time; a body with messages
        is of a chat."""

        async def run() -> list:
            options = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
            async with openai.AsyncOpenAI(**options) as client:

                def ask(body: dict) -> Awaitable[object]:
                    route = client.chat.completions if "messages" in body else client.completions
                    return route.create(**{"model": "gpt", **body})

                return await asyncio.gather(*map(ask, bodies))

        return asyncio.run(run())

    def metric(self, name: str) -> float:
        """The value of a metric; for one by model, the sum over the models if ``name`` has no label."""
        text = self.http.get("/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:\{{model=[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def wait_for_metric(self, name: str, value: float, *, or_more: bool = False) -> None:
        """Wait until the metric has this value.

        Raises:
            AssertionError: it does not come to have it.
        """
        end = time.monotonic() + METRIC_SECONDS
        while (last := self.metric(name)) != value and not (or_more and last > value):
            assert time.monotonic() < end, f"{name} is {last}, not {value}"
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Send a signal and wait; the exit code."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def _wait_for_url(self) -> str:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            found = re.search(r"serving .* on (http://\S+)", self.log)
            if found and _answers(found.group(1)):
                return found.group(1)
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the server did not start:\n{self.log}")


def error_of(answer: httpx.Response, status: int) -> dict[str, str | None]:
    """The error in an answer that must have this status."""
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def command(checkpoint: Path, *overrides: str) -> list[str]:
    words = [word for override in overrides for word in ("-o", override)]
    ckpt = ["-o", f"Engine.save_load.ckpt_dir={checkpoint / 'run'}"]
    config = str(checkpoint / "config.yaml")
    return [sys.executable, str(ROOT / "tools/serve.py"), "-c", config, *ckpt, *words]


@pytest.fixture(scope="session")
def served_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_checkpoint(tmp_path_factory.mktemp("served"))


def make_served_checkpoint(directory: Path) -> Path:
    """``config.yaml`` and ``run/`` with one checkpoint and its tokenizer."""
    write_run(directory / "run", MODEL)
    (directory / "run/tokenizer/chat_template.jinja").write_text(TOOLS + GPT2)
    sections = {"Global": {"device": "cpu", "local_batch_size": 1}, "Model": MODEL}
    (directory / "config.yaml").write_text(json.dumps(sections))
    return directory


@contextlib.contextmanager
def running(checkpoint: Path, log: Path, *overrides: str, **options: Any) -> Iterator[Server]:
    """A server, which ends well."""
    server = Server(checkpoint, log, *overrides, **options)
    yield server
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log


@pytest.fixture(scope="session")
def server(served_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server as it is by default, but for its batch."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    with running(served_checkpoint, log, "Serve.max_batch_size=8", executed=True) as server:
        yield server
    assert "stopped by SIGTERM" in server.log


@pytest.fixture(scope="session")
def strict_server(served_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key and narrow limits."""
    log = tmp_path_factory.mktemp("log") / "strict.log"
    limits = {"max_batch_size": 2, "max_waiting": 1, "max_body_bytes": 2000}
    overrides = [f"Serve.{name}={value}" for name, value in limits.items()]
    overrides.append(f"Serve.allowed_origins=[{ORIGIN}]")
    with running(served_checkpoint, log, "Serve.model_name=tiny", *overrides, key=KEY) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def offline(served_checkpoint: Path) -> Generator:
    options = [f"Engine.save_load.ckpt_dir={served_checkpoint / 'run'}"]
    return load_generator(load_config(served_checkpoint / "config.yaml", options), ParallelContext.single())
