"""The command ``ppfleetx``: its verbs, its usage, what it says of a mistake, and completion."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ppfleetx.commands.completion import bash_script
from ppfleetx.commands.main import GROUPS, VERBS, call, usage
from ppfleetx.config.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TOOLS = [*(ROOT / "tools").glob("*.py"), *(ROOT / "tasks/gpt").glob("*.py")]


def command(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ppfleetx", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=ROOT, **options)


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        call(name, ["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith(f"usage: ppfleetx {name} ")
    assert VERBS[name].command().__doc__.splitlines()[0] in said and name in usage()


def test_a_tool_is_a_verb() -> None:
    told = {}
    for tool in TOOLS:
        if not tool.name.startswith("gen_"):  # those write files
            (told[tool.name],) = re.findall(r'run_program\("([\w-]+)"\)', tool.read_text())
    assert set(told.values()) <= set(VERBS) and len(set(told.values())) == len(told)
    assert sum(len(verbs) for verbs in GROUPS.values()) == len(VERBS)


def test_help_imports_nothing_slow() -> None:
    program = (
        "import sys\n"
        "from ppfleetx.commands.main import usage\n"
        "from ppfleetx.commands.main import VERBS\n"
        "print(usage())\n"
        "for name, verb in VERBS.items():\n"
        "    verb.command().parser(name).format_help()\n"
        "    slow = {'paddle', 'numpy', 'pydantic', 'rich', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "    assert not slow, (name, slow)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip() == usage().strip()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "usage: ppfleetx VERB"),
        (["--version"], 0, "ppfleetx 0."),
        (["trian"], 2, "error: there is no verb 'trian': did you mean train? `ppfleetx --help`"),
        (["check", "-c", "nowhere.yaml"], 2, "error: nowhere.yaml: there is no such file"),
        (["train"], 2, "usage: ppfleetx train"),
        (["help", "configs"], 0, "usage: ppfleetx configs [-h] [copy NAME DIR"),
    ],
)
def test_exit_codes(words: list[str], code: int, said: str) -> None:
    done = command(*words)
    assert done.returncode == code and (done.stdout + done.stderr).startswith(said), done


def test_check_needs_no_paddle(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddle", None)
    config = ROOT / "ppfleetx/configs/nlp/gpt/pretrain_gpt_175B_mp8_pp16.yaml"
    assert call("check", ["-c", str(config)]) is None
    assert "128" in capsys.readouterr().out
    with pytest.raises(UserError, match="mp_degree"):
        call("check", ["-c", str(config), "-o", "Distributed.mp_degree=7"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_verbs_options_and_choices() -> None:
    def completed(*words: str) -> set[str]:
        line = " ".join(f"'{word}'" for word in words)
        ask = f"COMP_WORDS=(ppfleetx {line}); COMP_CWORD={len(words)}; _ppfleetx; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", bash_script() + ask], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert completed("tr") == {"train", "translate"}
    assert completed("train", "--ov") == {"--override"}
    assert completed("completion", "z") == {"zsh"}
    options = {
        word for action in VERBS["convert"].command().parser()._actions for word in action.option_strings
    }
    assert options <= completed("convert", "-")
