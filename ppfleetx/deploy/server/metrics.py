"""The Prometheus metrics of a server."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The Prometheus metrics of one server, in a registry of its own. Tokens and steps are counted separately
    for the base model and each LoRA adapter."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def made(kind: type, name: str, text: str, **more: Any) -> Any:
            return kind(f"ppfleetx_{name}", text, registry=self._registry, **more)

        self.requests = made(
            Counter,
            "requests",
            "Completion requests by HTTP status. 499: the client left. A stream that failed counts with the "
            "status of its error.",
            labelnames=["status"],
        )
        by_model = {"labelnames": ["model"]}
        self.prompt_tokens = made(Counter, "prompt_tokens", "Prompt tokens that were run.", **by_model)
        self.reused_tokens = made(
            Counter,
            "reused_prompt_tokens",
            "Prompt tokens that were not run, because their keys and values were in the prefix cache.",
            **by_model,
        )
        self.prefix_tokens = made(
            Gauge,
            "prefix_cache_tokens",
            "Positions in the prefix cache (Serve.prefix_cache_tokens).",
        )
        self.generated_tokens = made(Counter, "generated_tokens", "Tokens that were generated.", **by_model)
        self.steps = made(Counter, "steps", "Steps of the model's batch.", **by_model)
        self.running = made(Gauge, "sequences_running", "Sequences in the batch after the last step.")
        self.waiting = made(Gauge, "sequences_waiting", "Sequences that wait for a place in the batch.")
        arrival = "From a completion request's arrival to its"
        self.request_seconds = made(Histogram, "request_seconds", f"{arrival} end.", buckets=_SECONDS)
        self.first_token_seconds = made(
            Histogram, "first_token_seconds", f"{arrival} first token.", buckets=_SECONDS
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)
