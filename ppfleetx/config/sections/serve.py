"""Section ``Serve``: a model answering over HTTP."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ppfleetx.config.fields import (
    Bool,
    CountInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Says,
    Section,
    Text,
)

Port = Annotated[int, Field(strict=True, ge=0, le=65535), Says("an integer from 0 to 65535")]
Name = Annotated[str, Field(strict=True, min_length=1), Says("a text of at least one character")]

API_KEY_VARIABLE = "PPFLEETX_API_KEY"


class ServeConfig(Section):
    """The HTTP server of `ppfleetx serve`. How a text is continued comes with each request, and what a
    request leaves out has the default of OpenAI's interface; of section `Generation`, `eos_token_id` alone is
    used."""

    host: Name = "127.0.0.1"
    """Address to listen on; `0.0.0.0` is every address of the machine."""
    port: Port = 8000
    """Port to listen on; 0: one that is free, which the log names."""
    model_name: Name = "gpt"
    """Name of the model in requests and answers."""
    api_key_env: Text = API_KEY_VARIABLE
    """Environment variable with the key that requests must bring (`Authorization: Bearer KEY`). No key is
    needed when the default variable is not set; another one must be."""
    parse_special_tokens: Bool = True
    """Special tokens that a prompt's text holds, such as `<|endoftext|>`, become their ids, as with OpenAI's
    completions and vLLM; false: they are text like any other, for prompts of people who are not trusted."""
    max_batch_size: PositiveInt = 16
    """Sequences that grow at the same time; it bounds the memory of keys and values."""
    max_waiting: CountInt = 256
    """Sequences that wait for a place in the batch; a request beyond is answered 429."""
    max_prefill_tokens: PositiveInt = 2048
    """Prompt tokens, padding included, that are run in one step; a longer prompt is run alone."""
    prefix_cache_tokens: CountInt = 4096
    """Positions whose keys and values are kept after their sequence has ended, for prompts that begin in the
    same way: shared system messages, further turns of a chat. 0: none."""
    prompt_lookup_num_tokens: CountInt = 16
    """While at most 3 sequences grow, up to so many tokens of each are guessed from its earlier text and
    checked in one pass. It changes the speed, not the text; 0: no guesses."""
    chat_template: PathText | None = None
    """Chat template: a name of one of those that lie with the tokenizer, or a file; null: the default one,
    or a plain one where the model has none."""
    max_body_bytes: PositiveInt = 1 << 20
    """Largest request body; a larger one is answered 413."""
    request_timeout: PositiveFloat = 300.0
    """Seconds from a request to the end of its answer; then 504, or an error at the end of a stream."""
    shutdown_timeout: PositiveFloat = 10.0
    """Seconds that requests under way have to finish after SIGINT or SIGTERM."""
