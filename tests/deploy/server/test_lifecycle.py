"""The server process: start-up, shutdown, and its error messages."""

import signal
import socket
from pathlib import Path

import pytest

from ppfleetx.commands import initialize
from ppfleetx.commands.deploy_verbs import Serve
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.deploy.server import run
from tests.deploy.server.conftest import ENDLESS, Server, command
from tests.helpers import programs


def test_ctrl_c_ends_it_in_a_bounded_time(served_checkpoint: Path, tmp_path: Path) -> None:
    """A short answer is finished, an endless stream is ended with an error; exit code 0.

    SIGTERM takes the same way; the servers of the other tests are ended by it.
    """
    server = Server(served_checkpoint, tmp_path / "log", "Serve.shutdown_timeout=1")
    with (
        server.http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "stream": True, **ENDLESS}
        ) as endless,
        server.http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 20}
        ) as short,
    ):
        server.process.send_signal(signal.SIGINT)
        *_, end = [line for line in short.iter_lines() if line]
        *_, error, done = [line for line in endless.iter_lines() if line]
    assert end == done == "data: [DONE]"
    assert '"code":"shutting_down"' in error
    assert server.process.wait(60) == 0
    server.http.close()
    assert "may take 1 s to finish (Serve.shutdown_timeout); a second Ctrl-C ends" in server.log
    assert "stopped by SIGINT" in server.log
    assert "Traceback" not in server.log


def test_options_of_requests_on_the_command_line_are_named(
    served_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["Generation.min_p=0.1", "Generation.eos_token_id=[5, 6]", "Generation.ignore_eos=True"]
    run.check_generation(load_config(served_checkpoint / "config.yaml", options))
    assert "Generation.min_p, Generation.ignore_eos: the server does not read this" in caplog.text
    caplog.clear()
    run.check_generation(load_config(served_checkpoint / "config.yaml", options[1:2]))
    assert "does not read" not in caplog.text


def test_a_port_in_use_is_one_quick_message(served_checkpoint: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = programs.run(command(served_checkpoint, f"Serve.port={port}"), timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: Serve.port = {port} (-o override 2): cannot listen on 127.0.0.1:{port}: "
        "Address already in use\n"
    )
    assert done.stdout == "", "Paddle was loaded for nothing"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("Engine.save_load.ckpt_dir=/no/such/place",), "/no/such/place"),
        (("Serve.port=70000",), "Serve.port = 70000"),
        (("Serve.host=no.such.host.invalid",), "Serve.host = 'no.such.host.invalid'"),
        (("Serve.host=192.0.2.1",), "Serve.host = '192.0.2.1'"),  # an address for documentation
        (("Serve.api_key_env=NO_SUCH_KEY",), "Serve.api_key_env = 'NO_SUCH_KEY'"),
        (("Distributed.mp_degree=2",), "the server runs in one process with the whole model"),
        (("Serve.prot=1",), "Did you mean Serve.port"),
    ],
)
def test_a_users_mistake_is_found_before_paddle_is_loaded(
    served_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the process was started")

    monkeypatch.setattr(initialize, "start_with", loaded)
    options = [f"Engine.save_load.ckpt_dir={served_checkpoint / 'run'}", "Serve.port=0"]
    kept = [one for one in options if one.partition("=")[0] not in {o.partition("=")[0] for o in overrides}]
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        Serve(config=str(served_checkpoint / "config.yaml"), override=(*kept, *overrides)).run()


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_LIBRARIES", ("json", "no_such_library"))
    with pytest.raises(ConfigError, match=r"needs no_such_library: pip install 'ppfleetx\[serve\]'"):
        run.check_libraries()


def test_the_key_is_read_from_the_environment(served_checkpoint: Path) -> None:
    def key(variables: dict[str, str], *overrides: str) -> str | None:
        return run.read_api_key(load_config(served_checkpoint / "config.yaml", overrides), variables)

    assert key({}) is None
    assert key({"PPFLEETX_API_KEY": " abc\n"}) == "abc"
    assert key({"MINE": "xyz", "PPFLEETX_API_KEY": "abc"}, "Serve.api_key_env=MINE") == "xyz"
    for variables in ({"PPFLEETX_API_KEY": ""}, {"PPFLEETX_API_KEY": "  "}, {"PPFLEETX_API_KEY": "\u00e9"}):
        with pytest.raises(ConfigError, match="must be a non-empty ASCII text"):
            key(variables)


@pytest.mark.parametrize(
    ("host", "has_key", "warns"),
    [
        ("127.0.0.1", False, False),
        ("localhost", False, False),
        ("::1", False, False),
        ("0.0.0.0", False, True),
        ("0.0.0.0", True, False),
        ("example.org", False, True),
    ],
)
def test_an_open_server_without_a_key_warns(
    served_checkpoint: Path, caplog: pytest.LogCaptureFixture, host: str, has_key: bool, warns: bool
) -> None:
    cfg = load_config(served_checkpoint / "config.yaml", [f"Serve.host={host}"])
    run._warn_if_open(cfg.Serve, has_key=has_key)
    assert ("PPFLEETX_API_KEY" in caplog.text) == warns
