"""Start, run and shut down the OpenAI-compatible server."""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from ppfleetx.config.errors import ConfigError, UserError, naming
from ppfleetx.config.message_text import counted
from ppfleetx.config.reading.tree import is_argument
from ppfleetx.config.sections.generation import API_KEY_VARIABLE
from ppfleetx.config.sections.root import RunConfig, ServeConfig
from ppfleetx.utils.exit_codes import EXIT_INTERRUPTED
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    import uvicorn

    from ppfleetx.checkpoint.adapters import TrainedAdapters
    from ppfleetx.data.chat.templates import ChatTemplate
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer
    from ppfleetx.deploy.server.app import Service
    from ppfleetx.generation.generator import Generator

_LIBRARIES = ("fastapi", "uvicorn", "prometheus_client")
_MORE_SECONDS = 5.0  # extra time to close connections after the model's last event
_MORE_CONNECTIONS = 256  # extra connections for metrics, health checks and refused requests


def check_libraries() -> None:
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}: pip install 'ppfleetx[serve]'")


def check_generation(cfg: RunConfig) -> None:
    """Raise ConfigError for options that the server does not support, such as an assistant model. Warns of
    options of the command line that it does not read."""
    if cfg.Serve.adapters and cfg.Model.lora is not None:
        raise cfg.error(
            "Serve.adapters",
            "need a base model without Model.lora: serve the model that they were trained on",
        )
    if cfg.Serve.model_name in cfg.Serve.adapters:
        rule = f"{cfg.Serve.model_name} is the base model's name (Serve.model_name)"
        raise cfg.error("Serve.adapters", rule)
    if cfg.Generation.assistant_model is not None:
        raise cfg.error(
            "Generation.assistant_model",
            "the server drafts tokens only from earlier text (Serve.prompt_lookup_num_tokens)",
        )
    unread = [
        key
        for key, place in cfg.origins.items()
        if key.startswith("Generation.") and is_argument(place) and "eos_token_id" not in key.split(".")
    ]
    if unread:
        get_logger().warning(
            "%s: the server does not read this; each request brings its own options", ", ".join(unread)
        )


def read_api_key(cfg: RunConfig, environ: Mapping[str, str]) -> str | None:
    """Return the API key from the environment variable that ``Serve.api_key_env`` names. The default
    variable need not be set. If it is not, returns None, and clients need no key. Raises ConfigError if
    another variable is named and is not set, or if the key is empty or not ASCII."""
    name = cfg.Serve.api_key_env
    key = environ.get(name)
    if key is None and name == API_KEY_VARIABLE:
        return None
    if key is None or not key.strip() or not key.isascii():
        reason = "is not set" if key is None else "must be a non-empty ASCII text"
        raise cfg.error("Serve.api_key_env", f"this environment variable {reason}")
    return key.strip()


def open_socket(cfg: RunConfig) -> socket.socket:
    """Return a socket that is bound to the server's address, but does not listen yet. It is opened before the
    model is loaded, so that a port in use is reported early. Raises ConfigError if the address cannot be
    used."""
    host, port = cfg.Serve.host, cfg.Serve.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _address_error(cfg, "Serve.host", error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        key = "Serve.host" if error.errno == errno.EADDRNOTAVAIL else "Serve.port"
        raise _address_error(cfg, key, error) from error
    return listener


def _address_error(cfg: RunConfig, key: str, error: OSError) -> ConfigError:
    return cfg.error(key, f"cannot listen on {cfg.Serve.host}:{cfg.Serve.port}: {error.strerror}")


def build_service(
    cfg: RunConfig,
    generator: Generator,
    api_key: str | None,
    adapters: Mapping[str, TrainedAdapters] | None = None,
) -> Service:
    """Build the parts of the server, such as the scheduler and the chat template, for a loaded model.

    Raises:
        ConfigError: ``Serve.chat_template`` cannot be used.
        CheckpointError: a LoRA adapter does not fit the model.
    """
    from ppfleetx.deploy.server.app import Service
    from ppfleetx.deploy.server.metrics import Metrics
    from ppfleetx.deploy.server.prompts import PromptReader
    from ppfleetx.deploy.server.scheduler import Scheduler
    from ppfleetx.generation.adapters import Adapters

    model = generator.next_token_model.model
    model.eval()
    item_size = next(iter(model.parameters())).element_size()
    get_logger().info(
        "keys and values of %d sequences of %d tokens and of %d earlier ones: at most %.2f GiB "
        "(Serve.max_batch_size, Serve.prefix_cache_tokens)",
        cfg.Serve.max_batch_size,
        generator.max_positions,
        cfg.Serve.prefix_cache_tokens,
        (cfg.Serve.max_batch_size + cfg.Serve.prefix_cache_tokens / generator.max_positions)
        * cache_bytes(cfg, item_size)
        / 2**30,
    )
    metrics, end_ids = Metrics(), generator.end_ids(cfg.Generation)
    added = Adapters(generator.next_token_model)
    for name, one in (adapters or {}).items():
        added.add(name, one.tensors, scale=one.lora.scale)
        get_logger().info("adapter %r: rank %d, from %s", name, one.lora.rank, cfg.Serve.adapters[name])
    scheduler = Scheduler(generator.next_token_model, generator.tokenizer, end_ids, cfg.Serve, metrics, added)
    template = _chat_template(cfg, generator.tokenizer)
    for name, one in (adapters or {}).items():
        if one.template is not None and one.template != template.source:
            get_logger().warning(
                "adapter %r was trained with another chat template than the server's. Serve.chat_template "
                "sets one template for all models; the adapter's is tokenizer/chat_template.jinja in its "
                "checkpoint in %s",
                name,
                cfg.Serve.adapters[name],
            )
    prompts = PromptReader(generator, template, cfg.Serve, scheduler)
    return Service(cfg.Serve, api_key, prompts, scheduler, metrics, generator.tokenizer, int(time.time()))


def read_adapters(cfg: RunConfig) -> dict[str, TrainedAdapters]:
    """Read the LoRA adapters that ``Serve.adapters`` names, before the base model is loaded. Raises
    CheckpointError if one of them cannot be read."""
    from ppfleetx.checkpoint import adapters

    found = {}
    for name, place in cfg.Serve.adapters.items():
        with naming(f"Serve.adapters.{name}", place):
            found[name] = adapters.read_adapters(place, cfg.Engine.save_load.ckpt_dir)
    return found


def _chat_template(cfg: RunConfig, tokenizer: Tokenizer) -> ChatTemplate:
    from ppfleetx.data.chat.templates import chosen_template

    try:
        template = chosen_template(tokenizer, cfg.Serve.chat_template)
    except UserError as error:
        raise cfg.error("Serve.chat_template", str(error)) from error
    if template.is_plain:
        get_logger().info(
            "the model has no chat template: chats are written with the plain one (docs/chat.md)"
        )
    return replace(template, place="the chat template")  # clients need not know the server's directories


def cache_bytes(cfg: RunConfig, item_size: int) -> int:
    """Return the size in bytes of the key/value cache of one sequence of maximum length."""
    model = cfg.Model
    latent = model.latent_attention
    width = 2 * model.kv_heads * model.head_size if latent is None else latent.kv_rank + latent.rope_head_dim
    return model.num_layers * width * item_size * model.max_position_embeddings


def serve(service: Service, listener: socket.socket) -> None:
    """Listen on ``listener`` and answer requests until SIGINT or SIGTERM arrives."""
    from ppfleetx.resilience.stop_request import StopRequest

    _warn_if_open(service.cfg, has_key=service.api_key is not None)
    # uvicorn handles signals while it runs, and afterwards raises them again for the previous handlers.
    with StopRequest() as stop:
        _listen(service.cfg, listener)
        _make_server(service).run(sockets=[listener])
    get_logger().info("stopped%s", f" by {stop.signal_name}" if stop.signal_name else "")


def _listen(cfg: ServeConfig, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(512)
    except OSError as error:  # another program took the port while the model was loading
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}", key="Serve.port", value=cfg.port
        ) from error
    shown = f"[{host}]" if ":" in host else host
    get_logger().info("serving %r on http://%s:%d (stop: Ctrl-C or SIGTERM)", cfg.model_name, shown, port)


def _warn_if_open(cfg: ServeConfig, *, has_key: bool) -> None:
    try:
        is_local = ipaddress.ip_address(cfg.host).is_loopback
    except ValueError:
        is_local = cfg.host == "localhost"
    if not is_local and not has_key:
        get_logger().warning(
            "Serve.host = %s: anyone who reaches this machine can use the model; set %s to require a key",
            cfg.host,
            API_KEY_VARIABLE,
        )


def _make_server(service: Service) -> uvicorn.Server:
    import uvicorn

    from ppfleetx.deploy.server.app import create_app

    class Server(uvicorn.Server):
        """The uvicorn server, which also shuts down the scheduler. The first signal lets accepted requests
        finish within ``Serve.shutdown_timeout``, the second stops them, and the third ends the process at
        once."""

        num_signals = 0

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.num_signals += 1
            if self.num_signals == 1:
                super().handle_exit(sig, frame)
                service.scheduler.close(service.cfg.shutdown_timeout)
            elif self.num_signals == 2:
                service.scheduler.close(0)
            else:
                os._exit(EXIT_INTERRUPTED)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if running := len(self.server_state.tasks):
                get_logger().info(
                    "stopping: %s may take %g s to finish (Serve.shutdown_timeout); a second Ctrl-C ends now",
                    counted(running, "request"),
                    service.cfg.shutdown_timeout,
                )
            await super().shutdown(sockets)

    log = logging.getLogger("uvicorn")
    log.handlers, log.propagate = list(get_logger().handlers), False
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        http="h11",  # limits the size of headers, unlike httptools, uvicorn's default if installed
        ws="none",
        limit_concurrency=service.scheduler.capacity + _MORE_CONNECTIONS,
        timeout_graceful_shutdown=int(service.cfg.shutdown_timeout + _MORE_SECONDS),
    )
    return Server(config)
