"""Global batches, and data loaders built from a configuration file."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.loader import load_config
from ppfleetx.data.blended import exhaustive_indices
from ppfleetx.data.build import build_dataloader
from ppfleetx.data.dataloader import DataLoader, GlobalBatchSampler


def steps_of(sampler: GlobalBatchSampler, num: int) -> list[list[list[int]]]:
    batches = iter(sampler)
    return [[micro.tolist() for micro in next(batches)] for _ in range(num)]


def after(consumed_samples: int, sampler: GlobalBatchSampler) -> GlobalBatchSampler:
    sampler.start_after(consumed_samples)
    return sampler


def test_layout_of_micro_batches_and_ranks() -> None:
    """Consecutive chunks of micro batch x ranks, each rank taking its part of each chunk."""
    assert steps_of(after(16, GlobalBatchSampler(100, 8, 2, 0, 2)), 1) == [[[16, 17], [20, 21]]]
    assert steps_of(after(16, GlobalBatchSampler(100, 8, 2, 1, 2)), 1) == [[[18, 19], [22, 23]]]


@pytest.mark.parametrize("shuffle_seed", [None, 3])
@pytest.mark.parametrize(("data_size", "micro"), [(1, 8), (1, 4), (2, 2), (4, 1), (8, 1), (2, 4), (1, 1)])
def test_a_step_is_the_same_set_for_every_plan(data_size: int, micro: int, shuffle_seed: int | None) -> None:
    reference = after(5, GlobalBatchSampler(30, 8, 8, shuffle_seed=shuffle_seed))
    ranks = [
        after(5, GlobalBatchSampler(30, 8, micro, rank, data_size, shuffle_seed=shuffle_seed))
        for rank in range(data_size)
    ]
    for step in range(12):  # beyond the end of the data
        together = np.concatenate([np.concatenate(rank.micro_batches(step)) for rank in ranks])
        assert sorted(together) == sorted(reference.global_batch(step))
        assert all(len(rank.micro_batches(step)) == 8 // micro // data_size for rank in ranks)


def test_wrapping_starts_again_inside_a_batch() -> None:
    sampler = GlobalBatchSampler(10, 4, 4)
    assert sampler.num_steps is None
    assert steps_of(sampler, 4) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 0, 1]], [[2, 3, 4, 5]]]
    assert steps_of(GlobalBatchSampler(3, 4, 4), 1) == [[[0, 1, 2, 0]]]


@pytest.mark.parametrize(
    ("total", "drop", "pad"),
    [
        (10, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]),
        (8, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (3, [], [[0, 1, 2, -1]]),
    ],
)
def test_ends_of_an_evaluation(total: int, drop: list, pad: list) -> None:
    for tail, expected in (("drop", drop), ("pad", pad)):
        sampler = GlobalBatchSampler(total, 4, 4, tail=tail)
        assert [step[0].tolist() for step in sampler] == expected
        assert sampler.num_steps == len(expected)
    ranks = [GlobalBatchSampler(total, 4, 1, rank, 4, tail="pad") for rank in range(4)]
    assert all(len(list(rank)) == len(pad) for rank in ranks), "ranks must take the same number of steps"


LENGTH = 16


def make_config(tmp_path: Path, prefix: str | list[str], *overrides: str, **dataset):
    section = {"dataset": {"input_dir": prefix, "split": [80, 15, 5], "max_seq_len": LENGTH, **dataset}}
    tree = {
        "Global": {"global_batch_size": 8, "micro_batch_size": 2, "seed": 7},
        "Engine": {"max_steps": 20, "eval_freq": 10, "eval_iters": 3, "test_iters": 2},
        "Model": {
            "vocab_size": 50304,
            "hidden_size": 64,
            "num_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": LENGTH,
        },
        "Data": {"Train": section, "Eval": section, "Test": section},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_config(path, overrides)


def take(loader: DataLoader, steps: int) -> list[list[dict[str, np.ndarray]]]:
    batches = iter(loader)
    return [next(batches) for _ in range(steps)]


def test_batches_have_the_agreed_shapes(tmp_path: Path, toy_prefix: str) -> None:
    cfg = make_config(tmp_path, toy_prefix, eod_id=50256, reset_attention_mask=True)
    (step,) = take(build_dataloader(cfg, "Train", data_rank=1, data_size=2), 1)
    assert len(step) == 2
    for micro_batch in step:
        shapes = {name: (array.dtype.str, array.shape) for name, array in micro_batch.items()}
        assert shapes == {
            "tokens": ("<i8", (2, LENGTH)),
            "labels": ("<i8", (2, LENGTH)),
            "loss_mask": ("<f4", (2, LENGTH)),
            "position_ids": ("<i8", (2, LENGTH)),
            "document_start": ("<i4", (2, LENGTH)),
            "sample_ids": ("<i8", (2,)),
        }
        assert np.array_equal(micro_batch["tokens"][:, 1:], micro_batch["labels"][:, :-1])
    assert "document_start" not in take(build_dataloader(make_config(tmp_path, toy_prefix), "Train"), 1)[0][0]


def ids(step: list[dict[str, np.ndarray]]) -> list[int]:
    return np.concatenate([micro_batch["sample_ids"] for micro_batch in step]).tolist()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_resuming_gives_what_an_uninterrupted_run_reads(
    tmp_path: Path, toy_prefix: str, num_workers: int
) -> None:
    cfg = make_config(tmp_path, toy_prefix, f"Data.Train.loader.num_workers={num_workers}")
    whole = take(build_dataloader(cfg, "Train"), 30)
    assert [ids(step) for step in whole[:3]] == [list(range(8 * k, 8 * k + 8)) for k in range(3)]
    loader = build_dataloader(cfg, "Train")
    after(8 * 11, loader.sampler)
    rest = take(loader, 19)
    for left, right in zip(whole[11:], rest, strict=True):
        for a, b in zip(left, right, strict=True):
            assert all(np.array_equal(a[name], b[name]) for name in a)


def test_every_evaluation_reads_the_same_batches(tmp_path: Path, toy_prefix: str) -> None:
    loader = build_dataloader(make_config(tmp_path, toy_prefix), "Eval")
    first, second = list(loader), list(loader)
    assert [ids(step) for step in first] == [ids(step) for step in second]
    assert np.concatenate([ids(step) for step in first]).tolist() == list(range(3 * 8))


def test_an_exact_evaluation_counts_every_sample_once(tmp_path: Path, toy_prefix: str) -> None:
    cfg = make_config(tmp_path, toy_prefix, "Engine.eval_iters=1000", "Data.Eval.sampler.drop_last=False")
    loader = build_dataloader(cfg, "Eval")
    steps = list(loader)
    seen = np.concatenate([ids(step) for step in steps])
    num_samples = (loader.dataset.tokens_per_epoch - 1) // LENGTH
    assert num_samples % 8, "the case needs an incomplete last batch"
    assert seen[seen >= 0].tolist() == list(range(num_samples))
    assert len(seen) % 8 == 0
    counted = sum(float(m["loss_mask"].sum()) for step in steps for m in step)
    assert counted == num_samples * LENGTH


def test_sizes_of_the_three_modes(tmp_path: Path, toy_prefix: str) -> None:
    cfg = make_config(tmp_path, toy_prefix)
    loaders = {mode: build_dataloader(cfg, mode) for mode in ("Train", "Eval", "Test")}
    requested = {mode: loader.dataset.num_requested for mode, loader in loaders.items()}
    assert requested == {"Train": 20 * 8, "Eval": 3 * 8, "Test": 2 * 8}
    ranges = [(loader.dataset.first, loader.dataset.last) for loader in loaders.values()]
    assert ranges == [(0, 110), (110, 130), (130, 137)]
    assert len({loader.fingerprint for loader in loaders.values()}) == 3
    tokens = loaders["Train"].dataset.tokens_per_epoch
    described = f"{toy_prefix}: 110 documents, {tokens:,} tokens; 160 samples of 16 tokens = "
    assert loaders["Train"].describe() == f"{described}{160 * 16 / tokens:.2f} epochs"


def test_shuffling_visits_every_sample_once_a_pass_in_another_order(tmp_path: Path, toy_prefix: str) -> None:
    plain = build_dataloader(make_config(tmp_path, toy_prefix), "Train")
    cfg = make_config(tmp_path, toy_prefix, "Data.Train.sampler.shuffle=True")
    loader = build_dataloader(cfg, "Train")
    total = len(loader.dataset)
    seen = np.concatenate([ids(step) for step in take(loader, 2 * total // 8 + 1)])
    first, second = seen[:total], seen[total : 2 * total]
    assert sorted(first) == sorted(second) == list(range(total))
    assert first.tolist() != list(range(total)) and first.tolist() != second.tolist()
    assert loader.fingerprint != plain.fingerprint
    after(16, loader.sampler)
    assert ids(take(loader, 1)[0]) == seen[16:24].tolist()


def test_several_corpora_are_blended_by_size(tmp_path: Path, write_corpus, caplog) -> None:
    prefixes = [
        write_corpus([[token] * 20] * count, f"corpora/{name}")
        for name, token, count in [("a", 1000, 100), ("b", 2000, 300), ("tiny", 3000, 1)]
    ]
    cfg = make_config(tmp_path, str(tmp_path / "corpora"))
    with caplog.at_level("INFO", "ppfleetx"):
        loader = build_dataloader(cfg, "Train")
        steps = take(loader, 20)
    assert "blended in proportion" in caplog.text
    tokens = np.concatenate([m["tokens"][:, 0] for step in steps for m in step])
    assert (tokens == 2000).sum() / len(tokens) == pytest.approx(0.75, abs=0.01)
    cfg = make_config(tmp_path, prefixes[:2], weights=[0.5, 0.5])
    tokens = np.concatenate(
        [m["tokens"][:, 0] for step in take(build_dataloader(cfg, "Train"), 20) for m in step]
    )
    assert (tokens == 2000).mean() == 0.5


def test_an_exhaustive_blend_smaller_than_a_batch_needs_padding(tmp_path: Path, write_corpus) -> None:
    prefixes = [write_corpus([[1] * (LENGTH + 1)] * count, f"blend{count}") for count in (4, 3)]
    options = {"blend": "exhaustive", "split": [0, 1, 0]}
    cfg = make_config(tmp_path, prefixes, "Data.Train.dataset.split=[1,0,0]", **options)
    with pytest.raises(DataError, match=r"has 7 samples, less than .* 8, .*Data.Eval.sampler.drop_last"):
        build_dataloader(cfg, "Eval")
    cfg = make_config(tmp_path, prefixes, "Data.Eval.sampler.drop_last=False", **options)
    [step] = build_dataloader(cfg, "Eval")
    assert sum(batch["loss_mask"].any(axis=1).sum() for batch in step) == 7


def test_an_exhaustive_blend_reads_everything_once(tmp_path: Path, write_corpus, caplog) -> None:
    prefixes = [
        write_corpus([[1000 + number] * (LENGTH + 1)] * count, f"blend{number}")
        for number, count in enumerate((41, 7, 1, 20))
    ]
    short = write_corpus([[1] * LENGTH], "short")
    cfg = make_config(tmp_path, [*prefixes, short], blend="exhaustive", split=[1, 0, 0])
    with caplog.at_level("INFO", "ppfleetx"):
        loader = build_dataloader(cfg, "Train")
    sizes = [(count * (LENGTH + 1) - 1) // LENGTH for count in (41, 7, 1, 20)]
    assert [len(part) for part in loader.dataset.datasets] == sizes and len(loader.dataset) == sum(sizes)
    assert f"left out, since their split is shorter than one sample: {short}" in caplog.text
    assert f"reads 160 samples, and the exhaustive blend has {sum(sizes)}" in caplog.text
    steps = take(loader, -(-sum(sizes) // 8))
    tokens = np.concatenate([m["tokens"][:, 0] for step in steps for m in step])[: sum(sizes)]
    assert [(tokens == 1000 + number).sum() for number in range(4)] == sizes
    index = exhaustive_indices(sizes)[0]
    assert (tokens - 1000).tolist() == index.tolist()
    shorter = make_config(
        tmp_path, [*prefixes, short], "Engine.max_steps=2", blend="exhaustive", split=[1, 0, 0]
    )
    loader_of_less = build_dataloader(shorter, "Train")
    assert len(loader_of_less.dataset) == 16
    assert loader_of_less.fingerprint == loader.fingerprint, "more steps do not change the order"
    alone = build_dataloader(make_config(tmp_path, prefixes[0], blend="exhaustive"), "Train")
    plain = build_dataloader(make_config(tmp_path, prefixes[0]), "Train")
    assert alone.fingerprint == plain.fingerprint
    with pytest.raises(ConfigError, match=r"weights.*exhaustive blend takes all samples"):
        make_config(tmp_path, prefixes, blend="exhaustive", weights=[1, 1, 1, 1])


def test_run_mode_epoch_prepares_that_many_epochs(tmp_path: Path, toy_prefix: str) -> None:
    overrides = ("Engine.run_mode=epoch", "Engine.num_train_epochs=3", "Engine.max_steps=100000")
    loader = build_dataloader(make_config(tmp_path, toy_prefix, *overrides), "Train")
    assert loader.dataset.plan.num_epochs == 3
    assert loader.samples_per_epoch == loader.dataset.tokens_per_epoch / LENGTH


def test_the_evaluation_set_depends_on_neither_length_nor_pace(tmp_path: Path, toy_prefix: str) -> None:
    pace = [(), ("Engine.max_steps=100000",), ("Engine.eval_freq=1",), ("Engine.eval_freq=0",)]
    pace.append(("Engine.run_mode=epoch", "Engine.max_steps=500000", "Engine.eval_freq=1"))
    loaders = [build_dataloader(make_config(tmp_path, toy_prefix, *keys), "Eval") for keys in pace]
    assert {loader.dataset.num_requested for loader in loaders} == {3 * 8}
    assert len({loader.fingerprint for loader in loaders}) == 1
    first, *others = [[micro["tokens"].tolist() for step in loader for micro in step] for loader in loaders]
    assert all(other == first for other in others)


@pytest.mark.parametrize("keys", [("Engine.max_steps=1000000000000",), ("Engine.eval_iters=1000000000000",)])
def test_more_samples_than_memory_holds_are_refused(
    tmp_path: Path, toy_prefix: str, keys: tuple[str, ...], write_corpus
) -> None:
    mode = "Eval" if "eval" in keys[0] else "Train"
    other = write_corpus([[1, 2, 3] * 50] * 100, "other")
    for corpora in (toy_prefix, [toy_prefix, other]):
        with pytest.raises(DataError, match=r"takes [0-9,.]+ GiB of memory to build.*Engine.max_steps"):
            build_dataloader(make_config(tmp_path, corpora, *keys), mode)


def test_mistakes_are_said_at_once(tmp_path: Path, toy_prefix: str) -> None:
    with pytest.raises(
        DataError, match=r"Data\.Train\.dataset\.input_dir \(.*\): no corpus at .*ppfleetx prepare"
    ):
        build_dataloader(make_config(tmp_path, str(tmp_path / "nowhere")), "Train")
    for blend in (["0.3", toy_prefix, "0.7", toy_prefix], f"1 {toy_prefix} 2 {toy_prefix}"):
        with pytest.raises(DataError, match=r"PREFIX\] -o Data\.Train\.dataset\.weights="):
            build_dataloader(make_config(tmp_path, blend), "Train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no corpus in"):
        build_dataloader(make_config(tmp_path, str(tmp_path / "empty")), "Train")
    with pytest.raises(DataError, match="Test split is empty: it takes documents"):
        build_dataloader(make_config(tmp_path, toy_prefix, split=[969, 30, 1]), "Test")
    cfg = make_config(tmp_path, toy_prefix, "Data.Eval=null")
    with pytest.raises(ConfigError, match=r"Data\.Eval"):
        build_dataloader(cfg, "Eval")
    with pytest.raises(ConfigError, match="3 data ranks"):
        build_dataloader(cfg, "Train", 0, 3)


class Slow:
    """A dataset that fails or blocks where a test wants it to."""

    fingerprint, samples_per_epoch = "", 1.0

    def __init__(self, fail_at: int = -2) -> None:
        self.fail_at, self.read = fail_at, 0

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.read += 1
        if index == self.fail_at:
            raise DataError("sample is broken")
        return {"tokens": np.array([index])}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_reaches_the_consumer_at_its_step(num_workers: int) -> None:
    batches = iter(DataLoader(Slow(fail_at=9), GlobalBatchSampler(100, 2, 2), num_workers))
    assert [next(batches)[0]["tokens"][0, 0] for _ in range(4)] == [0, 2, 4, 6]
    with pytest.raises(DataError, match="sample is broken"):
        next(batches)


def test_threads_end_with_the_iteration_and_prefetch_is_bounded() -> None:
    before = threading.active_count()
    dataset = Slow()
    batches = iter(DataLoader(dataset, GlobalBatchSampler(1000, 2, 2), 2))
    next(batches)
    time.sleep(0.2)
    assert 2 < dataset.read <= 2 * (1 + 2 * 2)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


PROGRAM = """
import signal, sys, time, numpy as np
from ppfleetx.data.dataloader import DataLoader
from ppfleetx.data.dataloader import GlobalBatchSampler

class Dataset:
    fingerprint, samples_per_epoch = "", 1.0
    def __getitem__(self, index):
        time.sleep(0.01)
        return {"tokens": np.array([index])}

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell may have it ignored
batches = iter(DataLoader(Dataset(), GlobalBatchSampler(1000, 4, 4), 3))
next(batches)
print("started", flush=True)
if sys.argv[1] == "wait":
    for batch in batches:
        pass
"""


@pytest.mark.parametrize("how", ["leave", "wait"])
def test_no_thread_keeps_the_process_alive(how: str) -> None:
    """The program ends in the middle of the data: by its own end, or by Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "started\n"
        if how == "wait":
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert ("KeyboardInterrupt" in errors) == (how == "wait")
    assert process.returncode == (0 if how == "leave" else -signal.SIGINT)
