"""Text datasets: classification, and prompts with responses."""

import json
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.config.errors import DataError
from ppfleetx.config.sections.data import DatasetConfig
from ppfleetx.data.dataloader import DataLoader, GlobalBatchSampler
from ppfleetx.data.gpt_dataset import PADDING
from ppfleetx.data.tasks.finetuning import GlueDataset, PromptResponseDataset
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from tests.helpers.texts import small_tokenizer

GOLDEN_TOKENIZERS = Path(__file__).parents[2] / "goldens" / "tokenizers"


def glue(tmp_path, tokenizer, rows, max_seq_len=16):
    lines = [f"{i}\t{a}\t{b}\t{label}" for i, (a, b, label) in enumerate(rows)]
    (tmp_path / "train.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *lines]))
    cfg = DatasetConfig(name="RTE", input_dir=str(tmp_path), split="train", max_seq_len=max_seq_len)
    return GlueDataset(cfg, tokenizer, length_multiple=4)


def test_two_sentences_are_joined_by_the_separator(tmp_path, tokenizer):
    dataset = glue(tmp_path, tokenizer, [("the fox", "a dog", "entailment")])
    expected = [*tokenizer.encode("the fox"), tokenizer.eod_id, *tokenizer.encode("a dog")]
    sample = dataset[0]
    assert sample["tokens"][: sample["lengths"]].tolist() == expected
    assert (sample["tokens"][sample["lengths"] :] == tokenizer.eod_id).all()
    assert sample["labels"] == 0
    assert (sample["loss_mask"], dataset[PADDING]["loss_mask"]) == (1.0, 0.0)


def test_no_example_is_longer_than_asked_nor_empty(tmp_path, tokenizer):
    dataset = glue(tmp_path, tokenizer, [("the fox " * 9, "dog", "entailment"), ("", "", "entailment")], 8)
    ids = dataset[0]["tokens"].tolist()
    assert dataset[0]["lengths"] == 8
    assert ids[-len(tokenizer.encode("dog")) :] == tokenizer.encode("dog"), "the short one is whole"
    assert dataset[1]["lengths"] == 1


def test_steps_are_cut_to_their_longest_example(tmp_path, tokenizer):
    rows = [("the", "fox", "entailment")] * 3 + [("the fox jumps", "over the dog", "not_entailment")]
    dataset = glue(tmp_path, tokenizer, rows)
    loader = DataLoader(dataset, GlobalBatchSampler(4, 4, 2, tail="pad"))
    (step,) = loader
    longest = max(int(dataset[i]["lengths"]) for i in range(4))
    assert {batch["tokens"].shape for batch in step} == {(2, -(-longest // 4) * 4)}, "all micro batches alike"
    assert step[0]["labels"].tolist() + step[1]["labels"].tolist() == [0, 0, 0, 1]


def responses(tmp_path, tokenizer, records, max_seq_len=12, **more):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    cfg = DatasetConfig(
        name="PromptResponseDataset", input_dir=str(tmp_path), split="train", max_seq_len=max_seq_len, **more
    )
    return PromptResponseDataset(cfg, tokenizer)


def counted(sample):
    """The labels that count."""
    return sample["labels"][sample["loss_mask"] > 0].tolist()


def test_the_loss_is_on_the_response_and_its_end(tmp_path, tokenizer):
    dataset = responses(tmp_path, tokenizer, [{"prompt": "the fox", "response": " dog"}])
    prompt, response = tokenizer.encode("the fox"), tokenizer.encode(" dog")
    sample = dataset[0]
    assert counted(sample) == [*response, tokenizer.eod_id]
    assert sample["tokens"][: sample["lengths"]].tolist() == [*prompt, *response]
    assert (sample["labels"][:-1] == sample["tokens"][1:]).all()
    assert dataset[PADDING]["loss_mask"].sum() == 0


def test_long_ones_lose_the_beginning_of_the_prompt(tmp_path, tokenizer):
    dataset = responses(tmp_path, tokenizer, [{"prompt": "the fox " * 9 + "jumps", "response": " dog"}])
    response = [*tokenizer.encode(" dog"), tokenizer.eod_id]
    sample = dataset[0]
    assert counted(sample) == response
    given = tokenizer.encode("the fox " * 9 + "jumps")[-(13 - len(response)) :]
    assert sample["tokens"][: len(given)].tolist() == given
    assert sample["lengths"] == 12


def test_longer_responses_lose_their_end(tmp_path, tokenizer):
    dataset = responses(tmp_path, tokenizer, [{"prompt": "the fox", "response": "the dog " * 9}])
    sample = dataset[0]
    assert counted(sample) == tokenizer.encode("the dog " * 9)[:12]
    assert sample["tokens"][0] == tokenizer.encode("the fox")[-1]


def test_an_empty_prompt_begins_with_the_separator(tmp_path, tokenizer):
    dataset = responses(tmp_path, tokenizer, [{"q": "", "a": "fox"}], prompt_field="q", response_field="a")
    assert dataset[0]["tokens"][0] == tokenizer.eod_id
    assert counted(dataset[0]) == [*tokenizer.encode("fox"), tokenizer.eod_id]


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_bos_stands_once_at_the_beginning(tmp_path, name):
    """Not between prompt and response, and special tokens of a template become their ids."""
    llama = Tokenizer.load(GOLDEN_TOKENIZERS / name)
    end = llama.eod_token
    records = [
        {"prompt": "the quick brown", "response": " fox"},
        {"prompt": f"user asks{end}", "response": f"a{end}b"},
        {"prompt": "the quick brown fox " * 9, "response": " dog"},
        {"prompt": "", "response": "x"},
        {"prompt": "a", "response": "the lazy dog " * 9},
    ]
    dataset = responses(tmp_path, llama, records, max_seq_len=20)
    bos, special = llama.start_id, llama.encode_prompt(end, add_special_tokens=False)
    assert llama.prefix_ids == (bos,) and len(special) == 1
    for index, record in enumerate(records):
        sample = dataset[index]
        tokens = sample["tokens"][: sample["lengths"]].tolist()
        assert tokens[0] == bos and tokens.count(bos) == 1, record
    first = dataset[0]
    whole = llama.encode_prompt("the quick brown fox")
    assert [*first["tokens"][: first["lengths"]].tolist(), llama.eod_id] == [*whole, llama.eod_id]
    assert counted(first) == [*llama.encode_continuation(" fox"), llama.eod_id]
    assert counted(dataset[1]).count(special[0]) == 2
    assert dataset[2]["lengths"] == 20 and counted(dataset[3])[-1] == llama.eod_id
    assert counted(dataset[4]) == llama.encode_continuation("the lazy dog " * 9)[:20]


def test_glue_examples_begin_with_bos(tmp_path):
    llama = Tokenizer.load(GOLDEN_TOKENIZERS / "llama3")
    dataset = glue(
        tmp_path, llama, [("the dog", "the fox", "entailment"), ("the dog " * 30, "a", "entailment")]
    )
    sample = dataset[0]
    expected = [llama.start_id, *llama.encode("the dog"), llama.eod_id, *llama.encode("the fox")]
    assert sample["tokens"][: sample["lengths"]].tolist() == expected
    longer = dataset[1]
    assert longer["tokens"][0] == llama.start_id and longer["lengths"] == dataset.max_seq_len
    assert longer["tokens"][-2:].tolist() == [llama.eod_id, *llama.encode("a")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            '{"prompt": "a"}',
            r"train\.jsonl:2: field 'response' must be a text; the record's fields: 'prompt'",
        ),
        ('{"prompt": 1, "response": ""}', r"train\.jsonl:2: field 'prompt' must be a text, not 1$"),
        ("[]", r"train\.jsonl:2: must be an object with prompt and response"),
        ("{", r"train\.jsonl:2: this is not a line of JSON"),
        ('{"prompt": "\\ud800", "response": ""}', r"train\.jsonl:2: field 'prompt' holds a lone surrogate"),
    ],
)
def test_wrong_lines_are_named(tmp_path, tokenizer, line, words):
    responses(tmp_path, tokenizer, [{"prompt": "a", "response": "b"}])
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(line)
    cfg = DatasetConfig(name="PromptResponseDataset", input_dir=str(tmp_path), split="train")
    with pytest.raises(DataError, match=words):
        PromptResponseDataset(cfg, tokenizer)
    with pytest.raises(DataError, match=r"there is no file .*other\.jsonl"):
        PromptResponseDataset(cfg.model_copy(update={"split": "other"}), tokenizer)


def test_what_decides_the_samples_decides_the_fingerprint(tmp_path, tokenizer):
    record = [{"prompt": "a", "response": "b", "c": "d"}]
    same = [responses(tmp_path, tokenizer, record).fingerprint for _ in range(2)]
    others = [
        responses(tmp_path, tokenizer, record, max_seq_len=11).fingerprint,
        responses(tmp_path, tokenizer, record, response_field="c").fingerprint,
        responses(tmp_path, tokenizer, [{"prompt": "a", "response": "c"}]).fingerprint,
        responses(tmp_path, small_tokenizer(390), record).fingerprint,
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 5
    assert np.array_equal(responses(tmp_path, tokenizer, record)[0]["sample_ids"], 0)
