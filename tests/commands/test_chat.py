# ruff: noqa: E501 templates are long
"""Conversations in a terminal and over a pipe."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppfleetx.commands.chat import Conversation, Terminal, _options
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.generation import GenerationConfig
from ppfleetx.config.sections.root import ModelConfig
from ppfleetx.data.chat.templates import ChatError, ChatTemplate, find_template
from ppfleetx.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ppfleetx.generation.generator import Generator
from tests.generation.conftest import GPT2_STYLE, write_run
from tests.goldens.chat_styles import GPT2
from tests.models.gpt_builders import build

SHORT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the cat and the hat and the other cat"] * 3, 300)


@pytest.fixture(scope="module")
def generator(tokenizer: Tokenizer) -> Generator:
    cfg = ModelConfig(**GPT2_STYLE, vocab_size=300, max_position_embeddings=64, initializer_range=0.3)
    return Generator(build(cfg, 5), cfg, tokenizer)


def conversation(generator: Generator, *, limit: int = 6, source: str = SHORT) -> Conversation:
    options = GenerationConfig(decode_strategy="greedy_search", max_dec_len=limit)
    return Conversation(generator, ChatTemplate(source, {}), options)


def ask(chat: Conversation, text: str) -> tuple[str, object]:
    pieces: list[str] = []
    answer = chat.ask(text, pieces.append)
    return "".join(pieces), answer


def talk(chat: Conversation, typed: str) -> tuple[str, str]:
    output, notes = io.StringIO(), io.StringIO()
    Terminal(io.StringIO(typed), output, notes).talk(chat)
    return output.getvalue(), notes.getvalue()


def test_answers_are_those_of_the_generator_for_the_rendered_conversation(generator: Generator) -> None:
    chat = conversation(generator)
    chat.reset("be brief")
    first, _ = ask(chat, "the cat")
    second, _ = ask(chat, "hat?")
    prompts = ["s:be brief;u:the cat;a:", f"s:be brief;u:the cat;a:{first};u:hat?;a:"]
    expected = generator.generate(prompts, chat.options)
    assert [first, second] == [one.text.lstrip() for [one] in expected]
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"] * 2


def test_the_oldest_turns_are_left_out_and_the_system_message_stays(generator: Generator) -> None:
    chat = conversation(generator, limit=10)
    chat.reset("s")
    left_out = [ask(chat, f"{number}23456789")[1].left_out for number in range(6)]
    assert left_out[0] == 0
    assert left_out[-1] == 2
    assert chat.turns[0]["role"] == "user"
    assert chat.turns[0]["content"] != "023456789"
    assert chat.system == "s"
    before = list(chat.turns)
    with pytest.raises(ChatError, match="and the model has 64 positions: shorten it"):
        ask(chat, "0123456789" * 10)
    assert chat.turns == before
    text, answer = ask(chat, "01234567890123456789012345678901234567890123456")
    assert answer.left_out > 2
    assert answer.is_cut
    assert text


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(generator: Generator) -> None:
    chat = conversation(generator, limit=40)
    whole, _ = ask(chat, "the cat")
    chat.reset(None)
    seen: list[str] = []

    def interrupted(piece: str) -> None:
        seen.append(piece)
        if len(seen) == 3:
            raise KeyboardInterrupt

    answer = chat.ask("the cat", interrupted)
    assert answer.was_stopped
    assert chat.turns[-1] == {"role": "assistant", "content": "".join(seen)}
    assert whole.startswith("".join(seen))
    assert ask(chat, "and")[0], "and it goes on"


def test_a_plain_model_does_not_write_the_next_turn(generator: Generator, tokenizer: Tokenizer) -> None:
    options = GenerationConfig(decode_strategy="greedy_search", max_dec_len=6, stop="never")
    chat = Conversation(generator, find_template(tokenizer), options)
    output, notes = talk(chat, "the cat\n")
    assert "the model has no chat template" in notes
    [[expected]] = generator.generate(["User: the cat\n\nAssistant:"], options)
    assert output == expected.text.lstrip() + "\n"


def test_commands_and_messages_of_several_lines(generator: Generator) -> None:
    chat = conversation(generator)
    typed = 'one\\\ntwo\n\n  \n"""\n/not a command\\\nx\n"""\n/help\n/what\n'
    output, notes = talk(chat, typed)
    assert [turn["content"] for turn in chat.turns[::2]] == ["one\ntwo", "/not a command\\\nx"]
    assert output.count("\n") >= 2
    assert "/system TEXT" in notes
    assert "there is no command /what; /help lists them" in notes
    assert "the answer is as long as it may be" in notes
    talk(chat, "/system  be kind \nx")
    assert (chat.system, len(chat.turns)) == ("be kind", 2)
    talk(chat, "/reset\n")
    assert (chat.system, chat.turns) == ("be kind", [])
    talk(chat, "/system\n/exit\nnever asked\n")
    assert (chat.system, chat.turns) == (None, [])
    assert talk(chat, '"""\nwithout an end')[0]
    assert chat.turns[0]["content"] == "without an end"


def test_a_refused_message_is_told_and_the_next_is_asked(generator: Generator) -> None:
    source = "{% if 'bad' in messages[-1].content %}{{ raise_exception('not that') }}{% endif %}" + SHORT
    output, notes = talk(conversation(generator, source=source), "bad\nthe cat\n")
    assert "refuses the conversation: not that" in notes
    assert output.strip()


def test_options_that_no_chat_has_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    sizes = "{vocab_size: 300, hidden_size: 8, num_layers: 1, num_attention_heads: 1}"
    file.write_text(f"Global: {{local_batch_size: 1}}\nModel: {sizes}\nGeneration: {{max_dec_len: 30}}\n")
    for override, words in (
        ("Generation.num_return_sequences=2", "one sequence"),
        ("Generation.decode_strategy=beam_search", "sampling or greedy_search"),
        ("Generation.num_beams=3", "decode_strategy=beam_search too"),
    ):
        with pytest.raises(ConfigError, match=words):
            _options(load_config(file, [override]))
    assert _options(load_config(file)).max_dec_len == 512
    assert _options(load_config(file, ["Generation.max_dec_len=7"])).max_dec_len == 7


def test_over_a_pipe_standard_output_has_the_answers_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_run(tmp_path, tokenizer)
    given = ["-c", "pretrain.yaml", "-o", "Engine.save_load.ckpt_dir=run", "-o", "Generation.max_dec_len=4"]
    done = subprocess.run(
        [sys.executable, "-m", "ppfleetx", "chat", *given],
        input="the cat\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=True,
    )
    assert "INFO" not in done.stdout
    assert "with the weights of" in done.stderr


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_ends(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_run(tmp_path, tokenizer, max_position_embeddings=8192)
    (tmp_path / "run/tokenizer/chat_template.jinja").write_text(GPT2)
    endless = ["-o", "Generation.max_dec_len=8000", "-o", "Generation.min_dec_len=8000"]
    where = ["-c", "pretrain.yaml", "-o", "Engine.save_load.ckpt_dir=run"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ppfleetx", "chat", *where, *endless],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    os.close(theirs)
    seen = ""

    def wait_for(pattern: str, seconds: float = 120.0) -> None:
        nonlocal seen
        end = time.monotonic() + seconds
        while not re.search(pattern, seen, re.DOTALL):
            assert time.monotonic() < end, seen
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 65536).decode("utf-8", "replace")
        seen = ""

    try:
        wait_for("/help lists the commands.*> ")
        os.write(ours, b"the cat\n")
        wait_for("the cat\r\n.{20}")
        process.send_signal(signal.SIGINT)
        wait_for("stopped\r\n.*> ")
        os.write(ours, b"/reset\n")
        wait_for("starts over\r\n.*> ")
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
