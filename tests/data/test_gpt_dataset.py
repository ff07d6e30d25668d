"""GPT samples: tokens match the document stream, masks match values computed by hand."""

from pathlib import Path

import numpy as np
import pytest

from ppfleetx.config.errors import DataError
from ppfleetx.data.gpt_dataset import PADDING, GPTDataset, SampleOptions, make_sample
from ppfleetx.data.indexed_dataset import IndexedDataset

E = 9
WINDOW = np.array([7, 8, E, 5, 6, E, 3, 4])  # the inputs are all but the last


def options(**values) -> SampleOptions:
    return SampleOptions(7, eod_id=E, **values)


# Positions, loss mask and starts of attention for [7,8,E,5,6,E,3], as Megatron-LM d98e8a64 gives them.
@pytest.mark.parametrize(
    ("name", "array", "values"),
    [
        ("reset_position_ids", "position_ids", [0, 1, 2, 0, 1, 2, 0]),
        ("reset_attention_mask", "document_start", [0, 0, 0, 3, 3, 3, 6]),
        ("eod_mask_loss", "loss_mask", [1, 1, 0, 1, 1, 0, 1]),
    ],
)
def test_each_option_changes_its_array_alone(name: str, array: str, values: list[int]) -> None:
    plain, changed = make_sample(WINDOW, options()), make_sample(WINDOW, options(**{name: True}))
    differing = [key for key in changed if key not in plain or (plain[key] != changed[key]).any()]
    assert differing == [array] and changed[array].tolist() == values
    assert plain["position_ids"].tolist() == list(range(7)) and plain["loss_mask"].sum() == 7
    assert np.array_equal(plain["tokens"], WINDOW[:-1]) and np.array_equal(plain["labels"], WINDOW[1:])


@pytest.mark.parametrize("case", range(30))
def test_document_start_is_megatrons_dense_mask(case: int) -> None:
    """Rows after an end of document lose all columns up to it, one end after the other."""
    window = np.random.default_rng(case).integers(0, 4, 40)
    sample = make_sample(
        window, SampleOptions(39, reset_attention_mask=True, reset_position_ids=True, eod_id=3)
    )
    allowed, positions = np.tril(np.ones((39, 39), bool)), np.arange(39)
    for end in np.flatnonzero(window[:-1] == 3):
        allowed[end + 1 :, : end + 1] = False
        positions[end + 1 :] = np.arange(39 - end - 1)
    columns = np.arange(39)
    ours = (columns <= columns[:, None]) & (columns >= sample["document_start"][:, None])
    assert np.array_equal(ours, allowed)
    assert np.array_equal(sample["position_ids"], positions)


def build(
    prefix: str, tmp_path: Path, length: int = 32, first: int = 0, last: int = 137, **values
) -> GPTDataset:
    settings = {"num_samples": None, "seed": 1234, "cache_dir": tmp_path / "cache", **values}
    sample_options = SampleOptions(length, vocab_size=50257)
    return GPTDataset(IndexedDataset(prefix), first, last, sample_options, **settings)


@pytest.mark.parametrize("length", [1, 7, 32, 200, 6000])
def test_samples_cover_the_stream_once_and_overlap_by_one(
    toy_prefix: str, toy_documents: list[list[int]], tmp_path: Path, length: int
) -> None:
    tokens = sum(map(len, toy_documents))
    wanted = 2 * tokens // length - 1
    dataset = build(toy_prefix, tmp_path, length, num_samples=wanted)
    order = dataset._maps.document_index
    epochs = -(-(wanted * length + 1) // tokens)
    assert sorted(order.tolist()) == sorted(epochs * list(range(137))), "each document once an epoch"
    assert order.tolist() != epochs * list(range(137)), "shuffled"
    assert len(dataset) == (epochs * tokens - 1) // length >= wanted > 0
    stream = np.concatenate([toy_documents[document] for document in order])
    for index in range(len(dataset)):
        start = int(dataset._maps.shuffle_index[index]) * length
        sample = dataset[index]
        assert np.array_equal(sample["tokens"], stream[start : start + length])
        assert np.array_equal(sample["labels"], stream[start + 1 : start + length + 1])
        assert sample["sample_ids"] == index
    assert sorted(dataset._maps.shuffle_index.tolist()) == list(range(len(dataset)))


def test_a_padding_sample_counts_nowhere(toy_prefix: str, tmp_path: Path) -> None:
    sample = build(toy_prefix, tmp_path)[PADDING]
    assert sample["loss_mask"].sum() == 0
    assert sample["sample_ids"] == -1
    assert sample["tokens"].shape == (32,)


def test_too_little_text_is_said_with_numbers(toy_prefix: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"Eval split is empty.*\[137, 137\) of 137 \(6,903 tokens\).*needs 33"
    ):
        build(toy_prefix, tmp_path, 32, 137, 137, name="Eval", num_samples=100)
    with pytest.raises(DataError, match=r"has 6 tokens.*needs 33 tokens"):
        build(toy_prefix, tmp_path, 32, 0, 1)
    assert not (tmp_path / "cache").exists()
    assert len(build(toy_prefix, tmp_path, 6902)) == 1
    with pytest.raises(DataError, match="needs 6,904"):
        build(toy_prefix, tmp_path, 6903)


@pytest.mark.parametrize("dtype", ["u2", "i4"])
def test_ids_outside_the_vocabulary_name_their_document(write_corpus, tmp_path: Path, dtype: str) -> None:
    wrong = 50257 if dtype == "u2" else -5
    dataset = build(write_corpus([[1, 2, 3], [4, wrong, 6]], dtype=dtype), tmp_path, 5, 0, 2)
    with pytest.raises(
        DataError, match=rf"document 1 holds id {wrong} at token 1, but Model.vocab_size is 50257"
    ):
        dataset[0]


def test_describe_counts_epochs_and_warns_of_many(toy_prefix: str, tmp_path: Path) -> None:
    once = build(toy_prefix, tmp_path, num_samples=100).describe()
    assert "137 documents, 6,903 tokens; 100 samples of 32 tokens = 0.46 epochs" in once
    assert "WARNING" not in once
    assert (
        "WARNING: every document is read 4.6 times"
        in build(toy_prefix, tmp_path, num_samples=1000).describe()
    )


def test_options_that_need_the_end_of_document_ask_for_it() -> None:
    with pytest.raises(DataError, match="reset_position_ids, eod_mask_loss need"):
        SampleOptions(4, reset_position_ids=True, eod_mask_loss=True)
