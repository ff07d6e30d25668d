"""Two hundred chats at once, through the ``openai`` client, against the offline generator.

    python -m tests.deploy.server.many_chats

`make docs-test` runs it; the suite has a smaller form (``test_chat.py``). Half of the chats are sampled, half
greedy, each with a seed of its own; they are conversations of one to three turns, and most begin with the
same system message. Ends with 1 if a text differs.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import openai

from ppfleetx.commands.generate import load_generator
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.generation import GenerationConfig
from ppfleetx.data.chat.templates import find_template
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.generation.generator import Generator
from tests.deploy.server.conftest import Server, make_served_checkpoint

CHATS, NEW_TOKENS, TOP_P, TEMPERATURE = 200, 24, 0.9, 0.8
WORDS = ["the", "cat", "and", "the", "hat", "and", "the", "other", "cat", "sat", "on", "31415926", "mats"]


def conversation(number: int) -> list[dict[str, str]]:
    """Chat ``number``: one to three questions, with answers between them."""
    chance = np.random.default_rng(number)
    turns = [] if number % 5 == 4 else [{"role": "system", "content": "You are brief: 0123456789 words."}]
    for turn in range(1 + 2 * (number % 3)):
        text = " ".join(chance.choice(WORDS, 5))
        turns.append({"role": "assistant" if turn % 2 else "user", "content": text})
    return turns


async def ask_all(url: str) -> list[str]:
    limits = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 1200}
    async with openai.AsyncOpenAI(**limits) as client:

        async def one(number: int) -> str:
            sampling = {"temperature": TEMPERATURE, "top_p": TOP_P} if number % 2 else {"temperature": 0}
            body = {"messages": conversation(number), "max_tokens": NEW_TOKENS, "seed": number, **sampling}
            if number % 4 < 2:
                answer = await client.chat.completions.create(model="gpt", **body)
                return answer.choices[0].message.content or ""
            pieces = [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(model="gpt", stream=True, **body)
            ]
            return "".join(pieces)

        return await asyncio.gather(*map(one, range(CHATS)))


def offline(generator: Generator, number: int) -> str:
    """The answer of the offline generator."""
    template = find_template(generator.tokenizer)
    prompt = template.encode(generator.tokenizer, conversation(number), add_generation_prompt=True)
    sampling = {"temperature": TEMPERATURE, "top_p": TOP_P}
    options = sampling if number % 2 else {"decode_strategy": "greedy_search"}
    cfg = GenerationConfig(max_dec_len=NEW_TOKENS, seed=number, stop=template.stops or None, **options)
    return generator.generate([prompt], cfg)[0][0].text


def main() -> int:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of each request
    with tempfile.TemporaryDirectory() as scratch:
        made = make_served_checkpoint(Path(scratch))
        server = Server(made, Path(scratch) / "log", executed=True)
        try:
            began = time.monotonic()
            found = asyncio.run(ask_all(server.url))
            seconds = time.monotonic() - began
            names = ("prompt_tokens", "reused_prompt_tokens", "generated_tokens", "steps")
            run, reused, new, steps = (server.metric(f"ppfleetx_{name}_total") for name in names)
        finally:
            server.stop()
        options = [f"Engine.save_load.ckpt_dir={made / 'run'}"]
        generator = load_generator(load_config(made / "config.yaml", options), ParallelContext.single())
        wrong = 0
        for number, text in enumerate(found):
            expected = offline(generator, number)
            if text != expected:
                wrong += 1
                print(f"chat {number}: {text!r} instead of {expected!r}")
    print(f"{CHATS} chats at once in {seconds:.1f} s, {wrong} differ from the offline generator's")
    print(
        f"{run:.0f} prompt tokens were run, {reused:.0f} known from earlier chats; "
        f"{new:.0f} new ones in {steps:.0f} steps"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
