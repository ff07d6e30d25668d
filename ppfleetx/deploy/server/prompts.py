"""Turn client requests into `PromptRequest` messages for the scheduler: tokenize prompts and check
lengths and options."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.message_text import counted
from ppfleetx.config.sections.root import ServeConfig
from ppfleetx.data.chat.templates import ChatError, ChatTemplate
from ppfleetx.deploy.server.chat import ChatPrompt, ChatRequest
from ppfleetx.deploy.server.completions import CompletionRequest, Prompt
from ppfleetx.deploy.server.embeddings import EmbeddingRequest, TokenizeRequest
from ppfleetx.deploy.server.protocol import ApiError, GenerationRequest, Request, bad_request
from ppfleetx.deploy.server.scheduler import Scheduler
from ppfleetx.deploy.server.scheduler_messages import PromptRequest
from ppfleetx.generation.generator import TextGenerator
from ppfleetx.generation.sampling_params import PLAIN, SamplingParams, ended_by
from ppfleetx.generation.text_io import StopReason


class PromptReader:
    """Turns requests into lists of `PromptRequest`, one for each prompt. All methods raise ApiError 400 if a
    request does not fit the model."""

    def __init__(
        self, generator: TextGenerator, template: ChatTemplate, cfg: ServeConfig, scheduler: Scheduler
    ) -> None:
        self._tokenizer, self.max_positions = generator.tokenizer, generator.max_positions
        self._template = template
        self._cfg, self._max_batch_size = cfg, cfg.max_batch_size
        self._capacity, self._end_ids = scheduler.capacity, scheduler.end_ids
        vocabulary = range(self._tokenizer.vocab_size)
        self._longest_token = max(len(self._tokenizer.token_bytes(token)) for token in vocabulary)
        special = self._tokenizer.special_ids
        self._special_texts = [text for one in special if (text := self._tokenizer.decode([one]))]

    def of_completion(self, request: CompletionRequest) -> list[PromptRequest]:
        self._check_number(request, len(request.prompt))
        encoded = [self._encode(prompt, add=request.add_special_tokens) for prompt in request.prompt]
        return self._prompt_requests(request, "prompt", encoded, request.stop)

    def _adapter(self, request: Request) -> str | None:
        return request.model if request.model in self._cfg.adapters else None

    def of_chat(self, request: ChatRequest) -> list[PromptRequest]:
        self._check_number(request, 1)
        ids = self._encode_chat(request)
        return self._prompt_requests(request, "messages", [ids], (*request.stop, *self._template.stops))

    def of_embedding(self, request: EmbeddingRequest) -> list[PromptRequest]:
        encoded = [self._encode(one, add=request.add_special_tokens, param="input") for one in request.input]
        for ids in encoded:
            self._check_not_empty(ids, "input")
            if len(ids) > self.max_positions:
                raise self._too_long(str(len(ids)), "input")
        adapter = self._adapter(request)
        return [
            PromptRequest(index, index, ids, 1, 0, 0, {}, PLAIN, 0, (), is_embedded=True, adapter=adapter)
            for index, ids in enumerate(encoded)
        ]

    def token_ids(self, request: TokenizeRequest) -> list[int]:
        if request.prompt is None:
            return list(self._encode_chat(request))
        return list(self._encode(request.prompt, add=request.add_special_tokens))

    def _encode_chat(self, request: ChatPrompt) -> Sequence[int]:
        if not self._cfg.parse_special_tokens:
            self._refuse_special(request)
        template = self._template.for_tools(request.offered_tools or None)
        if request.offered_tools and "tools" not in template.source:
            raise bad_request(f"tools: {template.place} does not support them", "tools")
        try:
            text = self._template.render(request.messages, **request.template_variables)
        except (ChatError, DataError) as error:
            raise bad_request(f"messages: {error}", "messages") from error
        # Parse the template's special tokens; special tokens in messages have been refused above.
        return self._encode_text(text, "messages", add=False, parse=True)

    def _refuse_special(self, request: ChatPrompt) -> None:
        """Raise ApiError if a client's messages or tools contain the text of a special token, which could
        imitate the markup of the chat template."""
        parts = {f"messages.{number}": one for number, one in enumerate(request.messages)}
        parts |= {f"tools.{number}": one for number, one in enumerate(request.offered_tools)}
        for name, part in parts.items():
            text = json.dumps(part, ensure_ascii=False)
            found = next((one for one in self._special_texts if one in text), None)
            if found is not None:
                raise bad_request(
                    f"{name}: holds the special token {found!r}, which this server does not accept in texts "
                    "(Serve.parse_special_tokens)",
                    name.partition(".")[0],
                )

    def _check_number(self, request: GenerationRequest, num_prompts: int) -> None:
        name = "best_of" if request.candidates > request.n else "n"
        if request.candidates > self._max_batch_size:
            raise bad_request(
                f"{name}: {request.candidates} is more than the {counted(self._max_batch_size, 'sequence')} "
                "that can run at the same time (Serve.max_batch_size)",
                name,
            )
        if num_prompts * request.candidates > self._capacity:  # checked before tokenizing
            raise bad_request(
                f"prompt: {counted(num_prompts, 'prompt')} x {name} = {request.candidates} are more than the "
                f"{counted(self._capacity, 'sequence')} that can wait and run",
                "prompt",
            )

    def _prompt_requests(
        self,
        request: GenerationRequest,
        param: str,
        prompts: Sequence[Sequence[int]],
        stops: tuple[str, ...],
    ) -> list[PromptRequest]:
        for ids in prompts:
            self._check_not_empty(ids, param)
        end_ids, options = self._options(request, stops)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        return [
            PromptRequest(
                prompt_index=index,
                first_index=index * request.candidates,
                ids=ids,
                copies=request.candidates,
                max_new_tokens=self._max_new_tokens(len(ids), request, param),
                min_new_tokens=request.min_tokens,
                end_ids=end_ids,
                options=options,
                seed=seed,
                stops=stops,
                include_stop=request.include_stop_str_in_output,
                num_top=(request.num_top or 0) if request.needs_scores else None,
                scores_prompt=request.scores_prompt,
                adapter=self._adapter(request),
            )
            for index, ids in enumerate(prompts)
        ]

    def _options(
        self, request: GenerationRequest, stops: tuple[str, ...]
    ) -> tuple[dict[int, StopReason], SamplingParams]:
        param, form = request.form
        asked = request.model_copy(update={"structured_outputs": form})
        try:
            end_ids = ended_by(asked, stops, self._end_ids, self._tokenizer)
            return end_ids, SamplingParams.of(asked, self._tokenizer, tuple(end_ids))
        except (ConfigError, DataError) as error:
            message = str(error).removeprefix("Generation.")
            if message.startswith("structured_outputs"):
                raise bad_request(message.replace("structured_outputs", param, 1), param) from error
            raise bad_request(
                message, (getattr(error, "key", None) or "").removeprefix("Generation.")
            ) from error

    def text(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _encode(self, prompt: Prompt, *, add: bool, param: str = "prompt") -> Sequence[int]:
        if isinstance(prompt, str):
            return self._encode_text(prompt, param, add=add, parse=self._cfg.parse_special_tokens)
        return self.checked(prompt, param)

    def checked(self, ids: Sequence[int], param: str = "tokens") -> Sequence[int]:
        """Return ``ids`` unchanged. Raises ApiError if an id is not in the vocabulary."""
        wrong = [token for token in ids if not 0 <= token < self._tokenizer.vocab_size]
        if wrong:
            raise bad_request(
                f"{param}: {wrong[0]} is not a token id; ids run from 0 to {self._tokenizer.vocab_size - 1}",
                param,
            )
        return ids

    def _encode_text(self, text: str, param: str, *, add: bool, parse: bool) -> Sequence[int]:
        # Refuse very long texts without tokenizing them. Only for tiktoken: the normalizers of other
        # tokenizers can shorten a text.
        at_least = -(-len(text.encode("utf-8", "surrogatepass")) // self._longest_token)
        if at_least >= self.max_positions and self._tokenizer.engine_name == "tiktoken":
            raise self._too_long(f"at least {at_least}", param)
        try:
            return self._tokenizer.encode_prompt(text, add_special_tokens=add, parse_special_tokens=parse)
        except DataError as error:
            raise bad_request(f"{param}: {error}", param) from error

    def _check_not_empty(self, ids: Sequence[int], param: str) -> None:
        if not ids:  # the tokenizer can drop all characters of a text
            raise bad_request(f"{param}: has no token: there is nothing to continue", param)

    def _max_new_tokens(self, prompt_length: int, request: GenerationRequest, param: str) -> int:
        limit, room = request.token_limit, self.max_positions - prompt_length
        if room < 0 or (room == 0 and limit != 0):
            raise self._too_long(str(prompt_length), param)
        wanted = max(limit or 0, request.min_tokens)
        if (wanted > room and request.must_have_room) or request.min_tokens > room:
            raise bad_request(
                f"max_tokens: a prompt of {counted(prompt_length, 'token')} leaves room for {room} more in "
                f"the model's {self.max_positions} positions, not for {wanted}",
                "max_tokens",
                "context_length_exceeded",
            )
        return room if limit is None else min(limit, room)

    def _too_long(self, length: str, param: str) -> ApiError:
        return bad_request(
            f"{param}: {length} tokens are too many. The model has {self.max_positions} positions, room for "
            f"{self.max_positions - 1} tokens and one new one",
            param,
            "context_length_exceeded",
        )
