# ruff: noqa: E501 conversations are long
"""What transformers' ``apply_chat_template`` makes of conversations, for tests that run without it.

    python tests/goldens/make_hf_chats.py

writes ``hf_chats.json`` beside this file: for each style of ``chat_styles.py`` the rendered texts, token
ids, which tokens are the assistant's, and which conversations are refused. ``continued`` is the text with
``continue_final_message``; null where it is refused. Made with transformers 5.24.0.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.goldens.chat_styles import STYLES, write_style

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


def turns(*texts: str, system: str | None = None) -> list[dict]:
    roles = (USER, ASSISTANT) * len(texts)
    head = [] if system is None else [{"role": SYSTEM, "content": system}]
    return head + [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


TOOL = {
    "name": "add",
    "description": "a < b & 'c' \u00e9",
    "parameters": {"type": "object", "z": 1, "a": [1.5, None]},
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": "\u00fc<"}}}
CASES: list[dict] = [
    {"messages": turns("Hello")},
    {"messages": turns("Hello"), "add_generation_prompt": True},
    {"messages": turns("Hello", "Hi, how are you?", "  well \n"), "add_generation_prompt": True},
    {"messages": turns("a", "b", "c", "d", system="Be brief.\nBe kind.")},
    {"messages": turns(" x ", " {{ y }} <b>&amp;</b> ", "\u4f60\u597d \U0001f600", "caf\u00e9\n\n", system=" s "), "add_generation_prompt": True},
    {"messages": turns("", "")},
    {"messages": turns("</s><|im_end|> <|eot_id|>", "<|endoftext|>x")},
    {"messages": turns("Hello", "Hi"), "variables": {"date_string": "1 Jan 2024", "enable_thinking": False}, "add_generation_prompt": True},
    {"messages": [{"role": USER, "content": "one"}, {"role": USER, "content": "two"}]},
    {"messages": [*turns("Hello"), {"role": SYSTEM, "content": "late"}]},
    {"messages": [{"role": "narrator", "content": "hm"}]},
    {"messages": [{"role": USER, "content": "q"}, {"role": ASSISTANT, "content": "a", "reasoning": "because"}]},
    {"messages": [{"role": USER, "content": [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]}]},
    {"messages": [*turns("Hello"), {"role": ASSISTANT, "content": None, "tool_calls": [CALL]}], "tools": [TOOL]},
    {"messages": turns("Hello", "Hi"), "variables": {"bos_token": "[given]"}},
    {"messages": turns("Hello"), "template": "rag", "documents": [{"title": "T1", "text": "x"}, {"title": "T2", "text": "y"}]},
    {"messages": turns("Hello"), "template": "tool_use", "tools": [TOOL]},
]  # fmt: skip


def main() -> None:
    golden = {}
    with tempfile.TemporaryDirectory() as scratch:
        for style in STYLES:
            tokenizer = AutoTokenizer.from_pretrained(write_style(style, Path(scratch) / style))
            rows = [row for case in CASES if (row := _row(tokenizer, dict(case))) is not None]
            tokens = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
            golden[style] = {"special_tokens": tokens, "rows": rows}
    text = json.dumps(golden, indent=0, ensure_ascii=False)
    (HERE / "hf_chats.json").write_text(text + "\n", encoding="utf-8")


def _row(tokenizer: AutoTokenizer, case: dict) -> dict | None:
    """The case with what transformers makes of it; None where the tokenizer has no such template."""
    name = case.get("template")
    templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if name is not None and name not in templates:
        return None
    # A date would be another tomorrow.
    variables = {"date_string": "22 Nov 2026"} | case.get("variables", {})
    options = {key: case[key] for key in ("add_generation_prompt", "tools", "documents") if key in case}
    source = templates.get(name or "default", tokenizer.chat_template)
    options |= variables | {"chat_template": source}
    try:
        text = tokenizer.apply_chat_template(case["messages"], tokenize=False, **options)
    except Exception as error:  # noqa: BLE001  (whatever the template raises)
        return case | {"variables": variables, "error": str(error)}
    marked = tokenizer.apply_chat_template(
        case["messages"], return_dict=True, return_assistant_tokens_mask=True, **options
    )
    masks = [index for index, one in enumerate(marked["assistant_masks"]) if one]
    found = {"variables": variables, "text": text, "ids": marked["input_ids"], "assistant": masks}
    if isinstance(case["messages"][-1]["content"], str) and "add_generation_prompt" not in case:
        found["continued"] = _continued(tokenizer, case["messages"], options)
    return case | found


def _continued(tokenizer: AutoTokenizer, messages: list[dict], options: dict) -> str | None:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True, **options)
    except ValueError:
        return None


if __name__ == "__main__":
    main()
