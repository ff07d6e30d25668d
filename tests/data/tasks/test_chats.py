"""Chat datasets: which tokens count in the loss, truncation, and rejected records."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ppfleetx.checkpoint.config_and_tokenizer import documents_of
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.data import DatasetConfig
from ppfleetx.data.chat.conversations import read_conversation
from ppfleetx.data.chat.templates import ChatError, ChatTemplate, render_with_answers
from ppfleetx.data.gpt_dataset import PADDING
from ppfleetx.data.tasks.finetuning import ChatDataset
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from tests.goldens.chat_styles import QWEN, QWEN3, REWRITING, STYLES, write_style

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the dog?"},
    {"role": "assistant", "content": "the fox"},
    {"role": "user", "content": "12 34"},
    {"role": "assistant", "content": "caf\u00e9"},
]
ENDS = {"gpt2": "<|endoftext|>", "llama2": " </s>", "llama3": "<|eot_id|>", "qwen": "<|im_end|>"}


def section(directory: Path, max_seq_len: int = 200, **options: str) -> DatasetConfig:
    return DatasetConfig(
        name="ChatDataset", input_dir=str(directory), split="train", max_seq_len=max_seq_len, options=options
    )


def write(directory: Path, *conversations: list[dict]) -> None:
    lines = [json.dumps({"messages": one}) + "\n" for one in conversations]
    (directory / "train.jsonl").write_text("".join(lines))


def learnt(dataset: ChatDataset, index: int = 0) -> str:
    sample = dataset[index]
    return dataset.tokenizer.decode(sample["labels"][sample["loss_mask"] > 0])


def text_of(dataset: ChatDataset, index: int = 0) -> str:
    sample = dataset[index]
    return dataset.tokenizer.decode(sample["tokens"][: int(sample["lengths"])])


def unmarked(source: str) -> str:
    """A template that renders the same and does not say what the assistant's is."""
    opened = re.sub(r"(\{%-?) generation %\}", r"\1 if true %}", source)
    return re.sub(r"(\{%-?) endgeneration %\}", r"\1 endif %}", opened)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("marked", [True, False], ids=["generation blocks", "prefixes"])
def test_the_loss_is_on_what_the_assistant_says(tmp_path: Path, style: str, marked: bool) -> None:
    tokenizer = Tokenizer.load(write_style(style, tmp_path / style))
    write(tmp_path, CHAT)
    source = tokenizer.chat_templates["default"]
    if not marked:
        source = unmarked(source)
        (tmp_path / "own.jinja").write_text(source)
    options = {} if marked else {"chat_template": str(tmp_path / "own.jinja")}
    dataset = ChatDataset(section(tmp_path, **options), tokenizer)
    assert dataset.template.marks_answers is marked
    ids = dataset.template.encode(tokenizer, CHAT, date_string="x")
    sample, end = dataset[0], ENDS[style]
    if style != "llama3":  # whose template writes the date
        assert [*sample["tokens"][: sample["lengths"]], ids[-1]] == ids
    size = int(sample["lengths"])
    assert (sample["labels"][: size - 1] == sample["tokens"][1:size]).all()
    found = learnt(dataset)
    between = found.replace("the fox" + end, "", 1).replace("caf\u00e9" + end, "", 1)
    assert found.count(end.strip()) == 2
    assert between.strip() == "", "and at most the line ends behind a turn"
    assert dataset[PADDING]["loss_mask"].sum() == 0
    assert f"written with {dataset.template.place}" in dataset.describe()


def test_what_is_too_long_loses_its_oldest_turns_then_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.load(write_style("qwen", tmp_path / "qwen"))
    write(tmp_path, CHAT, [*CHAT[:2], {"role": "assistant", "content": "1234567890 " * 30}])
    whole = len(ChatDataset(section(tmp_path), tokenizer).template.encode(tokenizer, CHAT))
    exact = ChatDataset(section(tmp_path, whole - 1), tokenizer)
    assert learnt(exact).count("<|im_end|>") == 2
    assert "and loses" not in caplog.text
    dataset = ChatDataset(section(tmp_path, whole - 2), tokenizer)
    assert learnt(dataset) == "caf\u00e9<|im_end|>"
    assert "Be brief." in text_of(dataset)
    assert "the dog" not in text_of(dataset)
    assert (
        f"train.jsonl:1: is longer than max_seq_len = {whole - 2} and loses 2 messages at the" in caplog.text
    )
    assert learnt(dataset, 1).startswith("1234567890 1234567890")
    assert "<|im_end|>" not in learnt(dataset, 1)
    assert int(dataset[1]["lengths"]) == whole - 2
    assert caplog.text.count("and loses") == 1
    short = ChatDataset(section(tmp_path, 8), tokenizer)
    assert not learnt(short)
    assert caplog.text.count("loses 2 messages at the beginning and its end; no answer of it is") == 1


def turn(content: str | None, **more: object) -> dict:
    return {"role": "assistant", "content": content, **more}


ASK = {"role": "user", "content": "the dog?"}
THOUGHT = "<think>\nthe fox\n</think>\n\nquick"
CALL = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]}
RESULT = {"role": "tool", "content": "7"}
CONVERSATIONS = {
    "five turns": CHAT,
    "reasoning in the text": [ASK, turn(THOUGHT), ASK, turn(THOUGHT), ASK, turn(THOUGHT)],
    "reasoning beside it": [ASK, turn("a", reasoning_content="b"), ASK, turn("a", reasoning_content="b")],
    "nothing said": [ASK, turn(""), ASK, turn(""), ASK, turn(" \n")],
    "the same words again": [ASK, turn("the dog?"), ASK, turn("the dog?")],
    "markup": [ASK, turn("<b>"), ASK, turn("<|im_start|>assistant\n"), ASK, turn("</think><")],
    "two answers in a row": [ASK, turn("one"), turn("two"), ASK, turn("three")],
    "the assistant first": [turn("welcome"), ASK, turn("yes"), ASK, turn("no")],
}
WITH_TOOLS = {
    "a call": [ASK, turn(None, **CALL), RESULT, turn("7"), ASK, turn("no")],
    "a call and words": [CHAT[0], ASK, turn("wait", **CALL), RESULT, turn(THOUGHT), ASK, turn("", **CALL)],
    "a call last": [ASK, turn("yes"), ASK, turn(None, **CALL), RESULT, turn(None, **CALL)],
}


@pytest.mark.parametrize("style", REWRITING)
def test_turns_are_found_where_a_template_rewrites_earlier_ones(style: str) -> None:
    """As its own blocks mark them, but for what a generation prompt has said already, and line ends."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    blocks, bare = (ChatTemplate(s, tokens) for s in (REWRITING[style], unmarked(REWRITING[style])))
    for name, chat in (CONVERSATIONS | (WITH_TOOLS if style == "qwen3" else {})).items():
        text, expected = render_with_answers(blocks, chat)
        again, found = render_with_answers(bare, chat)
        assert again == text, name
        learnt = [
            {place for span in spans for place in range(*span) if text[place] != "\n"}
            for spans in (expected, found)
        ]
        assert learnt[0] == learnt[1], (name, [text[slice(*span)] for span in found])


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '' }};{% endfor %}",
        "{% for m in messages %}{{ ('' if loop.last else m.content | upper) + m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content if loop.last else m.content | length }};{% endfor %}",
    ],
    ids=["left out", "twice", "another content"],
)
def test_a_template_whose_turns_cannot_be_found_must_mark_them(source: str) -> None:
    with pytest.raises(ChatError, match=r"message 2: put \{% generation %\}"):
        render_with_answers(ChatTemplate(source, {}), CHAT)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "this is not a line of JSON"),
        ("[]", 'must be an object with "messages"'),
        ('[{"messages": []}]', "a file that holds one array of objects must have a name in .json"),
        ('{"text": "x"}', "ppfleetx prepare makes a corpus of plain texts"),
        ('{"question": "x", "answer": "y"}', "the texts here are 'question', 'answer'"),
        ('{"messages": []}', "has no list of messages"),
        ('{"conversations": 3}', "has no list of messages"),
        ('{"conversations": [{"value": "x"}]}', "message 0 must have from and value"),
        (
            '{"conversations": [{"from": "narrator", "value": "x"}]}',
            "message 0 is from 'narrator'; known are",
        ),
        ('{"conversations": [{"from": "gpt"}]}', "message 0 must have role and content"),
        ('{"conversations": [{"from": "human", "value": "x"}]}', "no message of the role assistant"),
        ('{"conversations": [{"from": "gpt", "value": "x"}], "tools": "["}', "tools are not JSON"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "tools": 3}', "tools must be a list: 3"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}',
            "message 0: arguments are not JSON",
        ),
        ('{"conversations": [{"from": "function_call", "value": "f(1)"}]}', "a function_call, is not JSON"),
        ('{"conversations": [{"from": "function_call", "value": "[1]"}]}', "must have name and arguments"),
        ('{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}', "has weight 0.5; it may be"),
        ('{"messages": [{"role": "assistant", "content": "x", "weight": 0}]}', "have weight 0, so there is"),
        (
            '{"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}',
            "message 0 must have role and content",
        ),
        ('{"instruction": "x", "output": "y", "history": ["z"]}', "history must be a list of pairs"),
        ('{"instruction": 3, "output": "x"}', "instruction and input must be texts"),
        ('{"instruction": "x", "output": null}', "message 1 must have role and content"),
        ('{"instruction": "x"}', '"instruction" and "output" (Alpaca)'),
        ('{"messages": [{"role": "user"}]}', "message 0 must have role and content"),
        ('{"messages": ["x"]}', "message 0 must have role and content"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message of the role assistant"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "a lone surrogate"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    tokenizer = Tokenizer.load(write_style("gpt2", tmp_path / "gpt2"))
    write(tmp_path, CHAT)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(line)
    with pytest.raises(DataError) as caught:
        ChatDataset(section(tmp_path), tokenizer)
    assert words in str(caught.value)
    assert "train.jsonl:2: " in str(caught.value)


SYSTEM, ASKED, SAID = CHAT[0]["content"], CHAT[1]["content"], CHAT[2]["content"]
FORMS = {
    "ShareGPT": {
        "id": "a",
        "conversations": [
            {"from": "system", "value": SYSTEM},
            {"from": "human", "value": ASKED},
            {"from": "gpt", "value": SAID, "markdown": None},
        ],
    },
    "ShareGPT, system and tools beside it": {
        "conversations": [{"from": "USER", "value": ASKED}, {"from": "chatgpt", "value": SAID}],
        "system": SYSTEM,
        "tools": "[]",
    },
    "roles under conversations": {"conversations": CHAT[:3]},
    "Alpaca": {"system": SYSTEM, "instruction": ASKED, "input": "", "output": SAID},
    "a system message beside messages": {"system": SYSTEM, "messages": CHAT[1:3]},
    "a system message at both places": {"system": "unused", "messages": CHAT[:3]},
    "parts of text": {
        "messages": [
            CHAT[0],
            {"role": "user", "content": [{"type": "text", "text": ASKED}]},
            {"role": "assistant", "content": [{"type": "text", "text": SAID}]},
        ]
    },
    "prompt and completion": {"prompt": CHAT[:2], "completion": CHAT[2:3]},
    "Alpaca with input": {"system": SYSTEM, "instruction": "the", "input": "dog?", "output": SAID},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_published_forms_are_read_as_they_are(tmp_path: Path, form: str, name: str) -> None:
    tokenizer = Tokenizer.load(write_style("qwen", tmp_path / "qwen"))
    record = FORMS[form]
    text = json.dumps([record] * 2, indent=2) if name.endswith(".json") else f"{json.dumps(record)}\n" * 2
    (tmp_path / name).write_text(text)
    dataset = ChatDataset(section(tmp_path), tokenizer)
    expected = dataset.template.encode(tokenizer, CHAT[:3])
    if form.endswith("input"):
        asked = {"role": "user", "content": "the\ndog?"}
        expected = dataset.template.encode(tokenizer, [CHAT[0], asked, CHAT[2]])
    assert len(dataset) == 2
    sample = dataset[1]
    assert [*sample["tokens"][: sample["lengths"]], expected[-1]] == expected
    assert learnt(dataset, 1) == f"{SAID}<|im_end|>"


def learnt_of(tmp_path: Path, record: dict, max_seq_len: int = 400, source: str = QWEN3) -> str:
    (tmp_path / "own.jinja").write_text(source)
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    directory = tmp_path / "qwen"
    tokenizer = Tokenizer.load(directory if directory.exists() else write_style("qwen", directory))
    return learnt(
        ChatDataset(section(tmp_path, max_seq_len, chat_template=str(tmp_path / "own.jinja")), tokenizer)
    ).rstrip("\n")


CALLED = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
AS_TEXT = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}]}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASK, turn(None, **CALL), RESULT, turn("seven")]},
        {"messages": [ASK, turn(None, **AS_TEXT), RESULT, turn("seven")]},
        {
            "conversations": [
                {"from": "human", "value": "the dog?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "7"},
                {"from": "gpt", "value": "seven"},
            ]
        },
    ],
    ids=["objects", "OpenAI's texts", "LLaMA-Factory"],
)
def test_calls_are_learnt_as_the_server_writes_them(tmp_path: Path, record: dict) -> None:
    assert CALLED in learnt_of(tmp_path, record)


def test_a_template_that_joins_arguments_to_text_gets_text(tmp_path: Path) -> None:
    call = "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}"
    source = "{% for m in messages %}" + call + "{{ m.content or '' }}<|im_end|>{% endfor %}"
    for call in (CALL, AS_TEXT):
        assert 'add {"x": 1}' in learnt_of(tmp_path, {"messages": [ASK, turn(None, **call)]}, source=source)


@pytest.mark.parametrize("form", [list, json.dumps])
def test_tools_may_be_a_list_or_its_text(form: Callable) -> None:
    function = {"name": "add", "parameters": {}}
    tool = {"type": "function", "function": function}
    for record in (
        {"messages": CHAT, "tools": form([tool])},
        {"conversations": CHAT, "tools": form([function])},
    ):
        assert read_conversation(json.dumps(record).encode(), "here")["tools"] == [tool]


@pytest.mark.parametrize(
    ("more", "name"), [({"tools": [{"name": "add"}]}, "tools"), ({}, "tool_calls")], ids=["tools", "calls"]
)
def test_what_a_template_would_leave_out_is_refused(tmp_path: Path, more: dict, name: str) -> None:
    with pytest.raises(DataError, match=rf"train\.jsonl:1: has {name}, which .* does not write"):
        learnt_of(tmp_path, {"messages": [ASK, turn(None, **CALL)], **more}, source=QWEN)


@pytest.mark.parametrize("source", [QWEN, unmarked(QWEN)], ids=["generation blocks", "prefixes"])
@pytest.mark.parametrize("unlearnt", [{"weight": 0}, {"train": False}, {"training": False}])
def test_answers_of_weight_0_are_not_learnt(tmp_path: Path, source: str, unlearnt: dict) -> None:
    chat = [ASK, turn("wrong", **unlearnt), ASK, turn("right", weight=1)]
    assert learnt_of(tmp_path, {"messages": chat}, source=source) == "right<|im_end|>"
    last = [ASK, turn("right"), ASK, turn("wrong " * 40, **unlearnt)]
    assert "right" in learnt_of(tmp_path, {"messages": last}, 60, source), "also if it is too long"
    parts = {"prompt": [ASK, turn("wrong"), ASK], "completion": [turn("right")]}
    assert learnt_of(tmp_path, parts, source=source) == "right<|im_end|>"


def test_answers_that_a_template_does_not_mark_one_by_one_have_no_weights(tmp_path: Path) -> None:
    whole = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(DataError, match="marks 1 text of 2 answers"):
        learnt_of(tmp_path, {"messages": [ASK, turn("a", weight=0), turn("b")]}, source=whole)


def test_a_developers_message_stays_like_a_system_message(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_style("gpt2", tmp_path / "gpt2"))
    write(tmp_path, [{**CHAT[0], "role": "developer"}, *CHAT[1:]])
    whole = int(ChatDataset(section(tmp_path), tokenizer)[0]["lengths"])
    dataset = ChatDataset(section(tmp_path, whole - 1), tokenizer)
    assert "Be brief." in text_of(dataset)
    assert "the dog" not in text_of(dataset)


def test_an_end_that_ends_no_text_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As with the template of a chat model and the tokenizer of its base."""
    directory = write_style("qwen", tmp_path / "qwen")
    write(tmp_path, CHAT)
    for eod_token, is_reported in (("<|begin_of_text|>", True), ("<|im_end|>", False)):
        caplog.clear()
        dataset = ChatDataset(section(tmp_path), Tokenizer.load(directory, eod_token=eod_token))
        dataset[0], dataset[0]
        said = caplog.text.count("<|im_end|>', which is not a token that ends a text")
        assert said == is_reported
        assert ("-o 'Data.tokenizer.eos_token=<|im_end|>' makes it one" in caplog.text) is is_reported


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_a_byte_order_mark_is_no_part_of_a_record(tmp_path: Path, name: str) -> None:
    records = json.dumps([{"messages": CHAT}] if name.endswith(".json") else {"messages": CHAT})
    (tmp_path / name).write_text(records, encoding="utf-8-sig")
    tokenizer = Tokenizer.load(write_style("gpt2", tmp_path / "gpt2"))
    assert len(ChatDataset(section(tmp_path), tokenizer)) == 1


@pytest.mark.parametrize("keys", [{"input_dir": "train.jsonl"}, {"split": "train.jsonl"}])
def test_who_names_the_file_itself_is_told_the_two_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, CHAT)
    tokenizer = Tokenizer.load(write_style("gpt2", tmp_path / "gpt2"))
    with pytest.raises(DataError, match=r"input_dir=\. -o Data\.\*\.dataset\.split=train$"):
        ChatDataset(section(Path()).model_copy(update=keys), tokenizer)


@pytest.mark.parametrize("record", [{"messages": CHAT[:3]}, {"conversations": CHAT[:3]}])
@pytest.mark.parametrize("tools", [[], None])
def test_an_empty_list_of_tools_is_none(record: dict[str, list], tools: list | None) -> None:
    assert read_conversation(json.dumps({**record, "tools": tools}).encode(), "here")["tools"] is None


def test_what_a_template_refuses_is_reported_with_its_line(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_style("llama2", tmp_path / "llama2"))
    write(tmp_path, CHAT, [CHAT[1], CHAT[1], CHAT[2]])
    dataset = ChatDataset(section(tmp_path), tokenizer)
    with pytest.raises(DataError, match=r"train\.jsonl:2: .* user and assistant must take turns"):
        dataset[1]
    with pytest.raises(ConfigError, match="there is no file nothing, and no chat template of this name"):
        ChatDataset(section(tmp_path, chat_template="nothing"), tokenizer)
    with pytest.raises(DataError, match=r"there is no file .*other\.jsonl; ChatDataset reads"):
        ChatDataset(section(tmp_path).model_copy(update={"split": "other"}), tokenizer)


def test_a_checkpoint_keeps_the_template_that_was_learnt(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_style("gpt2", tmp_path / "gpt2"))
    (tmp_path / "own.jinja").write_text(QWEN)
    write(tmp_path, CHAT)
    fingerprints = set()
    for options, expected in (
        ({}, tokenizer.chat_templates["default"]),
        ({"chat_template": str(tmp_path / "own.jinja")}, QWEN),
    ):
        dataset = section(tmp_path, **options)
        data = {"Train": {"dataset": dataset.model_dump(mode="json", exclude_unset=True)}}
        sizes = {"vocab_size": 600, "hidden_size": 8, "num_layers": 1, "num_attention_heads": 1}
        sections = {"Global": {"local_batch_size": 1}, "Model": sizes, "Data": data}
        (tmp_path / "config.yaml").write_text(json.dumps(sections))
        cfg = load_config(tmp_path / "config.yaml")
        assert documents_of(cfg, tokenizer)["tokenizer/chat_template.jinja"].decode() == expected
        fingerprints.add(ChatDataset(dataset, tokenizer).fingerprint)
    assert len(fingerprints) == 2
