"""The shell commands of a page, and how each is to be tried.

A comment above a code block says what a test does with it:

    <!-- test: skip, REASON -->       nothing
    <!-- test: check -->              needs GPUs or many machines: `tools/train.py --check` of the same plan
    <!-- test: tiny -o A.b=c ... -->  with the overrides of TINY, and those given here
    <!-- test: with WORDS -->         with these words behind each command
    <!-- test: serve WORDS -->        started in the background, with these words behind it if there are any;
                                      the next blocks talk to it
    <!-- test: quickstart -->         `make quickstart` with a small model
    <!-- test: exit N -->             the command ends with this code

A page that needs files says so in `<!-- test: given NAME, NAME -->` (tests/docs/scene.py makes them).
A block with a title (```yaml title="my.yaml") is written to that file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\s*$")
_MARK = re.compile(r"^ *<!-- test: (?P<mark>.+?) -->\s*$")
_GIVEN = "given "
_PORT = 8000  # of `Serve.port`

TINY = [
    *("Global.device=cpu", "Global.seed=1", "Global.local_batch_size=4", "Global.micro_batch_size=2"),
    *("Engine.max_steps=4", "Engine.eval_freq=2", "Engine.eval_iters=1", "Engine.logging_freq=1"),
    "Engine.save_load.save_steps=2",
    *(
        "Model.hidden_size=32",
        "Model.num_layers=2",
        "Model.num_attention_heads=4",
        "Model.ffn_hidden_size=64",
    ),
    "Model.max_position_embeddings=64",
    *("Optimizer.lr.decay_steps=null", "Optimizer.lr.warmup_rate=null", "Optimizer.lr.warmup_steps=1"),
]


@dataclass(frozen=True)
class Block:
    """One code block. `line` is that of its first line of code, counted from 1."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    mark: str

    @property
    def is_shell(self) -> bool:
        return self.language in ("shell", "bash", "sh")


@dataclass(frozen=True)
class Command:
    """One command of a block, as the page has it."""

    block: Block
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.block.page.name}:{self.line}"


def given(page: Path) -> list[str]:
    """What a page needs to be there before its first command."""
    marks = (_MARK.match(line) for line in page.read_text("utf-8").splitlines())
    found = [
        match["mark"].removeprefix(_GIVEN) for match in marks if match and match["mark"].startswith(_GIVEN)
    ]
    return [name.strip() for names in found for name in names.split(",")]


def blocks(page: Path) -> Iterator[Block]:
    """All code blocks that have a language."""
    lines = page.read_text("utf-8").splitlines()
    mark, number = "", 0
    while number < len(lines):
        if found := _MARK.match(lines[number]):
            mark = found["mark"]
        elif opening := _FENCE.match(lines[number]):
            first = number + 1
            number = next(i for i in range(first, len(lines)) if lines[i].strip() == "```")
            text = "\n".join(line.removeprefix(opening["indent"]) for line in lines[first:number])
            yield Block(page, first + 1, opening["language"], opening["title"], text, mark)
            mark = ""
        elif lines[number].strip():
            mark = ""
        number += 1


def commands(block: Block) -> Iterator[Command]:
    """The commands of a shell block: lines joined where one goes on, without those that are comments."""
    parts: list[str] = []
    first = block.line
    end: str | None = None  # of a here-document
    for number, line in enumerate(block.text.splitlines(), block.line):
        if not parts:
            first = number
            if not line.strip() or line.lstrip().startswith("#"):
                continue
        parts.append(line)
        if end is None and (here := re.search(r"<<-?\s*'?(\w+)'?", line)):
            end = here[1]
        goes_on = line.strip() != end if end is not None else line.endswith("\\")
        if not goes_on:
            yield Command(block, first, "\n".join(parts))
            parts, end = [], None
    if parts:
        raise ValueError(f"{block.page}:{first}: the command has no end")


def to_run(command: Command) -> str | None:
    """What is executed for a command; None: nothing. Raises ValueError for a mark that is not known."""
    word, _, rest = command.block.mark.partition(" ")
    text = _without_comment(command.text)
    match word.rstrip(","):
        case "skip":
            if not rest:
                raise ValueError(f"{command.place}: say why it is skipped")
            return None
        case "check":
            return f"{only_the_tool(text)} --check"
        case "tiny":
            return with_words(with_words(text, _overrides(TINY)), rest)
        case "with" | "serve":
            return with_words(text, rest)
        case "quickstart":
            return f"{text} --assume-old=.venv/.run ARGS='{_overrides(_QUICKSTART)}'"
        case "" | "exit":
            return text
    raise ValueError(f"{command.place}: there is no mark {word!r}")


_QUICKSTART = [
    *(value for value in TINY if "max_position_embeddings" not in value),
    "Data.Train.dataset.max_seq_len=64",
    "Data.Eval.dataset.max_seq_len=64",
]


def with_words(text: str, words: str) -> str:
    """A command with more words behind it; an override in them takes the place of one of the same key."""
    for key in re.findall(r"-o '?([\w.]+)=", words):
        text = re.sub(rf" *-o +('{re.escape(key)}=[^']*'|{re.escape(key)}=\S+)( *\\\n)?", r"\2", text)
    return f"{text} {words}".strip()


def _overrides(values: list[str]) -> str:
    return " ".join(f"-o {value}" for value in values)


def exit_code(command: Command) -> int:
    """The code that a command should end with."""
    word, _, rest = command.block.mark.partition(" ")
    return int(rest) if word == "exit" else 0


def only_the_tool(text: str) -> str:
    """A command without the launcher in front of it: ``python tools/train.py ...``."""
    words = shlex.split(text.replace("\\\n", " "))
    script = next((word for word in words if word.endswith(".sh")), None)
    if script is not None:
        config = re.search(r"tools/train\.py -c (\S+)", (ROOT / script).read_text("utf-8"))
        if config is None:
            raise ValueError(f"{script} trains nothing")
        return shlex.join(["python", "tools/train.py", "-c", config[1], *words[words.index(script) + 1 :]])
    tool = next((i for i, word in enumerate(words) if word in ("tools/train.py", "train")), None)
    if tool is None:
        raise ValueError(f"only training can be checked: {text}")
    head = ["python"] if words[tool].endswith(".py") else words[tool - 1 : tool]
    return shlex.join([*head, *words[tool:]])


def is_server(command: Command) -> bool:
    """Whether the command goes on until it is ended."""
    return command.block.mark.partition(" ")[0] == "serve"


def port(text: str) -> int:
    """Where a server that is started like this listens."""
    given_ports = re.findall(r"Serve\.port=(\d+)", text)
    return int(given_ports[-1]) if given_ports else _PORT


def _without_comment(text: str) -> str:
    """A command without the remark behind it (two spaces and a number sign)."""
    return re.sub(r" {2,}# .*$", "", text, flags=re.MULTILINE)
