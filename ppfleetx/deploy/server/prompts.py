"""Turn requests into jobs that fit the model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import DataError
from ppfleetx.config.sections.root import ServeConfig
from ppfleetx.data.chat.templates import ChatError, ChatTemplate
from ppfleetx.deploy.server.chat import ChatRequest
from ppfleetx.deploy.server.completions import CompletionRequest, Prompt
from ppfleetx.deploy.server.protocol import ApiError, GenerationRequest, bad_request
from ppfleetx.deploy.server.work import Job
from ppfleetx.generation.generator import TextGenerator
from ppfleetx.generation.sampling import RowOptions


class PromptReader:
    """Turns requests into jobs.

    Args:
        generator: the model's tokenizer and number of positions are used.
        template: the chat template.
        cfg: says whether special tokens are parsed, and limits the continuations per prompt.
        capacity: limit of continuations per request.
    """

    def __init__(
        self, generator: TextGenerator, template: ChatTemplate, cfg: ServeConfig, capacity: int
    ) -> None:
        self._tokenizer, self.max_positions = generator.tokenizer, generator.max_positions
        self._template = template
        self._cfg, self._max_batch_size, self._capacity = cfg, cfg.max_batch_size, capacity
        vocabulary = range(self._tokenizer.vocab_size)
        self._longest_token = max(len(self._tokenizer.token_bytes(token)) for token in vocabulary)
        special = self._tokenizer.special_ids
        self._special_texts = [text for one in special if (text := self._tokenizer.decode([one]))]

    def of_completion(self, request: CompletionRequest) -> list[Job]:
        """One job per prompt.

        Raises:
            ApiError: 400, the request does not fit the model.
        """
        self._check_number(request, len(request.prompt))
        encoded = [self._encode(prompt, add=request.add_special_tokens) for prompt in request.prompt]
        return self._jobs(request, encoded, request.stop)

    def of_chat(self, request: ChatRequest) -> list[Job]:
        """The job that answers a conversation.

        Raises:
            ApiError: 400, the template refuses the conversation, or it does not fit the model.
        """
        self._check_number(request, 1)
        if not self._cfg.parse_special_tokens:
            self._refuse_special(request)
        options = request.chat_template_kwargs
        try:
            text = self._template.render(request.messages, add_generation_prompt=True, **options)
        except (ChatError, DataError) as error:
            raise bad_request(f"messages: {error}", "messages") from error
        # The template's own tokens are special; those in messages have been refused.
        ids = self._encode_text(text, "messages", add=False, parse=True)
        return self._jobs(request, [ids], (*request.stop, *self._template.stops))

    def _refuse_special(self, request: ChatRequest) -> None:
        """Refuse special tokens in messages, which could not be told from those of the template."""
        for number, message in enumerate(request.messages):
            text = str(message.get("content") or "")
            found = next((one for one in self._special_texts if one in text), None)
            if found is not None:
                raise bad_request(
                    f"messages.{number}: holds the special token {found!r}, and this server takes none from "
                    "texts (Serve.parse_special_tokens)",
                    "messages",
                )

    def _check_number(self, request: GenerationRequest, num_prompts: int) -> None:
        name = "best_of" if request.candidates > request.n else "n"
        if request.candidates > self._max_batch_size:
            raise bad_request(
                f"{name}: {request.candidates} is more than the {counted(self._max_batch_size, 'sequence')} "
                "that may grow together (Serve.max_batch_size)",
                name,
            )
        if num_prompts * request.candidates > self._capacity:  # before any of them is tokenized
            raise bad_request(
                f"prompt: {counted(num_prompts, 'prompt')} x {name} = {request.candidates} are more than the "
                f"{counted(self._capacity, 'sequence')} that can be waiting and under way",
                "prompt",
            )

    def _jobs(
        self, request: GenerationRequest, prompts: Sequence[Sequence[int]], stops: tuple[str, ...]
    ) -> list[Job]:
        options = RowOptions(
            request.temperature,
            request.top_k,
            request.top_p,
            request.repetition_penalty,
            request.presence_penalty,
            request.frequency_penalty,
        )
        seed = secrets.randbits(63) if request.seed is None else request.seed
        return [
            Job(
                number=number,
                first_index=number * request.candidates,
                ids=ids,
                copies=request.candidates,
                max_new_tokens=self._max_new_tokens(len(ids), request),
                min_new_tokens=request.min_tokens,
                options=options,
                seed=seed,
                stops=stops,
                num_top=(request.num_top or 0) if request.needs_scores else None,
                scores_prompt=request.scores_prompt,
            )
            for number, ids in enumerate(prompts)
        ]

    def text(self, prompt: Prompt) -> str:
        """A prompt as ``echo`` returns it."""
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _encode(self, prompt: Prompt, *, add: bool) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._encode_text(prompt, "prompt", add=add, parse=self._cfg.parse_special_tokens)
        wrong = [token for token in prompt if not 0 <= token < self._tokenizer.vocab_size]
        if wrong:
            raise bad_request(
                f"prompt: {wrong[0]} is not a token id; ids run from 0 to {self._tokenizer.vocab_size - 1}",
                "prompt",
            )
        return prompt

    def _encode_text(self, text: str, param: str, *, add: bool, parse: bool) -> Sequence[int]:
        # Cheaper than tokenizing a megabyte only to find it too long. (A normalizer may shorten a text.)
        at_least = -(-len(text.encode("utf-8", "surrogatepass")) // self._longest_token)
        if at_least >= self.max_positions and self._tokenizer.engine_name == "tiktoken":
            raise self._too_long(f"at least {at_least}", param)
        try:
            ids = self._tokenizer.encode_prompt(text, add_special_tokens=add, parse_special_tokens=parse)
        except DataError as error:
            raise bad_request(f"{param}: {error}", param) from error
        if not ids:  # the tokenizer drops all characters of the text
            raise bad_request(f"{param}: has no token: there is nothing to continue", param)
        return ids

    def _max_new_tokens(self, prompt_length: int, request: GenerationRequest) -> int:
        room, limit = self.max_positions - prompt_length, request.token_limit
        param = "prompt" if isinstance(request, CompletionRequest) else "messages"
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
