"""The server's metrics in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server, in a registry of its own, so that one process can run several servers."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "ppfleetx_requests",
            "Completion requests by HTTP status; 499: the client left, and a stream that broke off counts "
            "by why it did.",
            ["status"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "ppfleetx_prompt_tokens", "Prompt tokens that were run.", registry=registry
        )
        self.reused_tokens = Counter(
            "ppfleetx_reused_prompt_tokens",
            "Prompt tokens that were not run, because an earlier sequence had begun with them.",
            registry=registry,
        )
        self.prefix_tokens = Gauge(
            "ppfleetx_prefix_cache_tokens",
            "Positions whose keys and values are held for prompts to come (Serve.prefix_cache_tokens).",
            registry=registry,
        )
        self.generated_tokens = Counter(
            "ppfleetx_generated_tokens", "Tokens that were generated.", registry=registry
        )
        self.steps = Counter("ppfleetx_steps", "Steps of the batch.", registry=registry)
        self.running = Gauge(
            "ppfleetx_sequences_running", "Sequences in the batch after the last step.", registry=registry
        )
        self.waiting = Gauge(
            "ppfleetx_sequences_waiting", "Sequences that wait for a place in the batch.", registry=registry
        )
        self.request_seconds = Histogram(
            "ppfleetx_request_seconds",
            "From a completion request's arrival to its end.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "ppfleetx_first_token_seconds",
            "From a completion request's arrival to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)
