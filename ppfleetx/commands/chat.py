"""Implement ``ppfleetx chat``, a conversation with a model in a terminal or over a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from ppfleetx.checkpoint.resolve_checkpoint import named_checkpoint, open_resolved, resolve_checkpoint
from ppfleetx.commands.generate import (
    check_checkpoint,
    check_options,
    check_plan,
    find_tokenizer,
    load_generator,
)
from ppfleetx.commands.initialize import start_with
from ppfleetx.config.errors import ConfigError, UserError
from ppfleetx.config.message_text import counted
from ppfleetx.config.reading.tree import is_argument
from ppfleetx.config.rules import check_one_process
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.data.chat.templates import ChatError, ChatTemplate, chosen_template

if TYPE_CHECKING:
    from ppfleetx.commands.model_verbs import Chat
    from ppfleetx.config.sections.generation import GenerationConfig
    from ppfleetx.generation.generator import TextGenerator

DEFAULT_NEW_TOKENS = 512
"""The maximum number of tokens of an answer, unless -o Generation.max_dec_len sets it. A larger maximum in
the checkpoint's configuration is kept."""
_QUOTES = '"""'
HELP = """\
/system TEXT  set the system message and start over; without TEXT: none
/reset        forget the conversation
/help         this list
/exit         end (so does the end of the input, Ctrl-D)

A line that ends in a backslash continues in the next line. A message between two lines of \"\"\" may have
any number of lines, and commands and backslashes in it mean nothing. Ctrl-C stops an answer."""


@dataclass
class Conversation:
    """A conversation with a model.

    Attributes:
        generator: generates the answers with the loaded model.
        template: the chat template, which turns messages into a prompt.
        options: the generation settings; ``max_dec_len`` limits the tokens of an answer.
        seed: the seed of the next answer. Each answer increases it by 1.
        system: the system message; None if there is none.
        turns: the messages and answers so far, oldest first.
    """

    generator: TextGenerator
    template: ChatTemplate
    options: GenerationConfig
    seed: int = 0
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def reset(self, system: str | None) -> None:
        self.system, self.turns = system, []

    def ask(self, text: str, on_text: Callable[[str], None]) -> AnswerReport:
        """Add the user's message ``text`` to the conversation, and generate the model's answer. The answer is
        streamed: ``on_text`` is called with each newly generated part of it. Ctrl-C stops generation, and
        what was generated so far stays in the conversation. Returns how the answer ended, such as whether it
        was cut off at the length limit.

        Raises:
            ChatError: the chat template refuses the message, or the message is too long. The conversation is
                unchanged.
        """
        before = list(self.turns)
        self.turns.append({"role": "user", "content": text})
        try:
            return self._answer(on_text)
        except UserError:
            self.turns = before
            raise

    def _answer(self, on_text: Callable[[str], None]) -> AnswerReport:
        pieces: list[str] = []

        def take(_prompt: int, _copy: int, piece: str) -> None:
            # Strip the space that the model can generate first, between the prompt and the answer.
            piece = piece if pieces else piece.lstrip()
            if piece:
                pieces.append(piece)
                on_text(piece)

        ids, left_out = self._prompt()
        room = self.generator.max_positions - len(ids)
        limits = {key: min(getattr(self.options, key), room) for key in ("max_dec_len", "min_dec_len")}
        stops = (*self.options.stops, *self.template.stops) or None
        options = self.options.model_copy(update={**limits, "stop": stops})
        was_stopped, reason = False, "stop"
        try:
            [[made]] = self.generator.generate([ids], options, seed=self.seed, on_text=take)
            reason = made.finish_reason
        except KeyboardInterrupt:
            was_stopped = True
        self.seed += 1
        self.turns.append({"role": "assistant", "content": "".join(pieces)})
        return AnswerReport(left_out, was_stopped, reason == "length")

    def _prompt(self) -> tuple[list[int], int]:
        """Return the token ids of the conversation, and how many messages were removed from it. The oldest
        messages are removed from :attr:`turns` if the context length leaves too little room for an answer."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        wanted, left_out = min(self.options.max_dec_len, self.generator.max_positions // 4), 0
        while True:
            messages = [*head, *self.turns]
            ids = self.template.encode(self.generator.tokenizer, messages, add_generation_prompt=True)
            room = self.generator.max_positions - len(ids)
            if room >= wanted or (room > 0 and len(self.turns) == 1):
                return ids, left_out
            if len(self.turns) == 1:
                raise ChatError(
                    f"with system message and chat template the message has {counted(len(ids), 'token')}, "
                    f"and the model has {self.generator.max_positions} positions: shorten it"
                )
            self.turns = self.turns[2:]  # a question and its answer
            left_out += 2


@dataclass(frozen=True)
class AnswerReport:
    """What the terminal reports below the text of an answer: how its generation ended, and how many old
    messages were left out of the prompt."""

    left_out: int  # number of old messages that no longer fit the model's context length
    was_stopped: bool  # by Ctrl-C
    is_cut: bool  # at the length limit


def run(chat: Chat) -> None:
    answers = sys.stdout
    with redirect_stdout(sys.stderr), chat.job() as job:  # the log
        Terminal(sys.stdin, answers, sys.stderr).talk(_begin(job.load(), chat))


def _begin(cfg: RunConfig, chat: Chat) -> Conversation:
    check_plan(cfg)
    check_one_process(cfg, "chat")
    check_checkpoint(cfg)
    options = _options(cfg)
    tokenizer = find_tokenizer(cfg, open_resolved(resolve_checkpoint(named_checkpoint(cfg))))
    template = chosen_template(tokenizer, chat.template, key="--template")
    cfg, ctx = start_with(cfg)
    generator = load_generator(cfg, ctx, tokenizer)
    seed = cfg.Global.seed if cfg.Generation.seed is None else cfg.Generation.seed
    return Conversation(generator, template, options, seed, chat.system)


def _options(cfg: RunConfig) -> GenerationConfig:
    check_options(cfg)
    section = cfg.Generation
    if section.num_return_sequences != 1 or section.decode_strategy == "beam_search":
        key = "decode_strategy" if section.decode_strategy == "beam_search" else "num_return_sequences"
        raise cfg.error(
            f"Generation.{key}",
            "chat shows one answer while it is generated: use sampling or greedy_search, and one sequence",
        )
    # A checkpoint's max_dec_len was chosen for samples during training. It is often too short for answers.
    is_given = is_argument(cfg.origins.get("Generation.max_dec_len", ""))
    limit = section.max_dec_len if is_given else max(DEFAULT_NEW_TOKENS, section.max_dec_len)
    return section.model_copy(update={"max_dec_len": limit, "seed": None})


class Terminal:
    """The terminal interface of a chat. Reads messages and commands from ``source``, writes answers to
    ``output``, and writes everything else, such as help, to ``notes``."""

    def __init__(self, source: TextIO, output: TextIO, notes: TextIO) -> None:
        self._source, self._output, self._notes = source, output, notes
        self._is_watched = source.isatty()
        if self._is_watched:
            import readline  # noqa: F401 (gives input() a history and keys to edit with)

    def talk(self, conversation: Conversation) -> None:
        """Read and answer messages until the input ends or the user enters ``/exit``."""
        if conversation.template.is_plain:
            self._note(
                "the model has no chat template: messages are written as 'User: ...', 'Assistant: ...' "
                '(docs/chat.md, "Models without a template")'
            )
        if self._is_watched:
            self._note("/help lists the commands")
        for text, is_command in self._messages():
            if is_command:
                if not self._obey(text, conversation):
                    return
            elif text.strip():
                self._answer(text, conversation)

    def _answer(self, text: str, conversation: Conversation) -> None:
        try:
            report = conversation.ask(text, self._write)
        except UserError as error:
            self._note(str(error))
            return
        self._write("\n")
        if report.left_out:
            self._note(
                f"the {report.left_out} oldest messages are left out: the model has "
                f"{conversation.generator.max_positions} positions"
            )
        if report.was_stopped:
            self._note("stopped")
        elif report.is_cut:
            self._note("the answer is as long as it may be (-o Generation.max_dec_len=N)")

    def _obey(self, line: str, conversation: Conversation) -> bool:
        """Execute a chat command such as ``/help``. Returns False if the command ends the conversation."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/help":
            self._note(HELP)
        elif name == "/reset":
            conversation.reset(conversation.system)
            self._note("the conversation starts over")
        elif name == "/system":
            conversation.reset(rest.strip() or None)
            self._note(
                "the conversation starts over" + (", with this system message" if rest.strip() else "")
            )
        else:
            self._note(f"there is no command {name}; /help lists them")
        return True

    def _messages(self) -> Iterator[tuple[str, bool]]:
        """Yield each message or command that the user enters, as a tuple (text, whether the text is a
        command). A message can have several lines."""
        while (line := self._line("> ")) is not None:
            if line.strip() == _QUOTES:
                yield "\n".join(self._until_quotes()), False
            elif line.startswith("/"):
                yield line.strip(), True
            else:
                lines = [line]
                while lines[-1].endswith("\\"):
                    lines[-1] = lines[-1][:-1]
                    lines.append(self._line(". ") or "")
                yield "\n".join(lines), False

    def _until_quotes(self) -> Iterator[str]:
        while (line := self._line(". ")) is not None and line.strip() != _QUOTES:
            yield line

    def _line(self, prompt: str) -> str | None:
        """Read the next line; None at the end of the input. In a terminal, Ctrl-C discards the unfinished
        line."""
        while True:
            try:
                if self._is_watched:
                    return input(prompt)
                line = self._source.readline()
                return line.rstrip("\r\n") if line else None
            except EOFError:
                self._write("\n")
                return None
            except KeyboardInterrupt:
                if not self._is_watched:
                    raise
                self._note("\n(/exit or Ctrl-D ends)")
            except UnicodeDecodeError as error:
                raise ConfigError(f"standard input is not UTF-8 text: {error}") from error

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()

    def _note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)
