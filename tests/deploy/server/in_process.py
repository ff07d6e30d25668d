"""A server inside this process, without a port."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from ppfleetx.config.sections.root import ServeConfig
from ppfleetx.data.chat.templates import find_template
from ppfleetx.deploy.server.app import Service, create_app
from ppfleetx.deploy.server.metrics import Metrics
from ppfleetx.deploy.server.prompts import PromptReader
from ppfleetx.deploy.server.scheduler import Scheduler
from ppfleetx.generation.generator import Generator

Use = Callable[[httpx.AsyncClient, Service], Awaitable[None]]


def serve(generator: Generator, cfg: ServeConfig, use: Use, model: object | None = None) -> None:
    """Run ``use`` against a server of the generator's model, or of ``model`` in its place."""
    metrics = Metrics()
    served = generator.next_token_model if model is None else model
    scheduler = Scheduler(served, generator.tokenizer, generator.tokenizer.end_ids, cfg, metrics)
    prompts = PromptReader(generator, find_template(generator.tokenizer), cfg, scheduler)
    service = Service(cfg, None, prompts, scheduler, metrics, generator.tokenizer, 0)

    async def main() -> None:
        app = create_app(service)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://server") as client,
        ):
            await use(client, service)
        assert scheduler.join(0), "its thread has ended with the server"

    asyncio.run(main())
