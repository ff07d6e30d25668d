"""What the prompts of one batch have in common, and the random numbers of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ppfleetx.config.sections.root import GenerationConfig
from ppfleetx.generation.gumbel_sampling import RandomStream, uniforms
from ppfleetx.generation.prompt_lookup import MOST_ROWS
from ppfleetx.generation.search import Choose, Sampler, greedy

OnText = Callable[[int, int, str], None]
"""(prompt number, continuation number, new piece of its text)."""


@dataclass(frozen=True)
class Batch:
    """A batch of prompts.

    Attributes:
        cfg: the ``Generation`` section.
        default_seed: counts when ``cfg.seed`` is None.
        first_prompt: number of the first prompt of the batch in the whole list.
        max_new_tokens: of each prompt.
        end_ids: tokens that end a row.
        on_text: see :data:`OnText`.
    """

    cfg: GenerationConfig
    default_seed: int
    first_prompt: int
    max_new_tokens: list[int]
    end_ids: tuple[int, ...]
    on_text: OnText | None

    @property
    def streams(self) -> list[tuple[int, int]]:
        """(prompt of the batch, copy) of each row."""
        copies = self.cfg.num_return_sequences
        return [(i, copy) for i in range(len(self.max_new_tokens)) for copy in range(copies)]

    @property
    def uses_lookup(self) -> bool:
        """Whether tokens are guessed: for few rows, where the likeliest is taken, which repeats itself."""
        cfg = self.cfg
        is_greedy = cfg.decode_strategy == "greedy_search" and cfg.num_return_sequences == 1
        is_small = len(self.max_new_tokens) <= MOST_ROWS
        return is_greedy and is_small and cfg.use_cache and cfg.prompt_lookup_num_tokens > 0

    @property
    def seed(self) -> int:
        return self.default_seed if self.cfg.seed is None else self.cfg.seed

    @property
    def _all_streams(self) -> list[tuple[int, int]]:
        """(prompt of the whole list, copy) of each row."""
        return [(self.first_prompt + prompt, copy) for prompt, copy in self.streams]

    def exponentials(self, vocab_size: int) -> np.ndarray:
        """``[rows, steps, n]`` float32: numbers of all steps, see `RandomStream`."""
        steps = max(self.max_new_tokens)
        streams = [RandomStream(self.seed, *stream, vocab_size) for stream in self._all_streams]
        return np.stack([stream.numbers(0, steps) for stream in streams])

    def uniforms(self) -> np.ndarray:
        """``[rows, steps]`` float32: what programs exported in format 2 draw each row by."""
        steps = max(self.max_new_tokens)
        return np.stack([uniforms(self.seed, *stream, steps) for stream in self._all_streams])

    def choose(self, vocab_size: int) -> Choose:
        """How the tokens of the rows are chosen, of ids below ``vocab_size``."""
        cfg = self.cfg
        if cfg.decode_strategy == "greedy_search":
            return greedy
        return Sampler(
            self.seed,
            self._all_streams,
            vocab_size,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
        )
