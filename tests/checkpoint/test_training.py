"""Live tensors: out into slices, back under other paddings, element types and slices."""

import numpy as np
import paddle
import pytest

from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.rng import rng_state, set_rng_state
from ppfleetx.checkpoint.slices import whole
from ppfleetx.checkpoint.state_dict import (
    host_array,
    load_model,
    load_optimizer,
    model_slices,
    optimizer_slices,
)
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.optimizer import OptimizerConfig
from ppfleetx.nn.init import Constant
from ppfleetx.nn.param_spec import ParamInfo
from ppfleetx.optims.build import build_optimizer
from ppfleetx.optims.optimizer import UpdatePlace
from tests.checkpoint.checkpoints import save

VOCAB = 10
WORD, HEAD, NORM = "embedding.word_embeddings.weight", "head.weight", "decoder.final_norm.weight"
KINDS = {WORD: "word_embedding", HEAD: "head", NORM: "norm"}


def parameter(name, values, dtype="float32", offset=None, global_shape=None):
    zeros = paddle.nn.initializer.Constant(0.0)
    param = paddle.create_parameter(list(values.shape), dtype, default_initializer=zeros)
    param.set_value(paddle.to_tensor(values).astype(dtype))
    shape = tuple(values.shape)
    param.info = ParamInfo(
        name, global_shape or shape, offset or (0,) * len(shape), shape, Constant(0.0), KINDS[name]
    )
    return name, param


def model(padded=12, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = {WORD: (padded, 4), HEAD: (4, padded), NORM: (4,)}
    return [
        parameter(name, rng.standard_normal(shape).astype(np.float32), dtype)
        for name, shape in shapes.items()
    ]


def values(params):
    return {name: param.astype("float32").numpy() for name, param in params}


def saved(tmp_path, params, optimizer=None, step=1, vocab_size=VOCAB):
    tensors = list(model_slices(params))
    if optimizer is not None:
        tensors += optimizer_slices(optimizer.state(), params)
    return open_checkpoint(save(tmp_path, step=step, tensors=tensors, vocab_size=vocab_size))


def trained(params, steps=2):
    optimizer = build_optimizer(OptimizerConfig(), params)
    for _ in range(steps):
        for _, param in params:
            param.grad = paddle.ones_like(param) * 0.5 + param.detach() * 0.1
        optimizer.step(1e-2, 0.1)
    return optimizer


def test_model_and_optimizer_come_back_bit_for_bit(tmp_path):
    params, other = model(), model(seed=1)
    optimizer, fresh = trained(params), build_optimizer(OptimizerConfig(), other)
    checkpoint = saved(tmp_path, params, optimizer)
    assert (
        checkpoint.entry(WORD).vocab_dim == 0
        and checkpoint.entry(HEAD, "optimizer", "moment1").vocab_dim == 1
    )
    assert checkpoint.entry(WORD, "optimizer", "beta1_pow").shape == (1,)
    load_model(other, checkpoint, vocab_size=VOCAB)
    load_optimizer(fresh.state(), other, checkpoint)
    for key, tensor in optimizer.state().items():
        assert np.array_equal(tensor.numpy(), fresh.state()[key].numpy()), key
    for a, b in zip(values(params).values(), values(other).values(), strict=True):
        assert np.array_equal(a, b)


def test_slices_are_taken_when_the_writer_comes_to_them():
    params = model()
    slices = list(model_slices(params))
    params[2][1].set_value(np.full(4, 7, np.float32))
    assert slices[2].array().tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("padded", [10, 11, 16])
def test_vocabulary_padded_otherwise(tmp_path, padded):
    params, other = model(), model(padded, seed=1)
    optimizer, fresh = trained(params), build_optimizer(OptimizerConfig(), other)
    checkpoint, before = saved(tmp_path, params, optimizer), values(other)
    load_model(other, checkpoint, vocab_size=VOCAB)
    load_optimizer(fresh.state(), other, checkpoint)
    source, target = values(params), values(other)
    assert np.array_equal(target[WORD][:VOCAB], source[WORD][:VOCAB])
    assert np.array_equal(target[WORD][VOCAB:], before[WORD][VOCAB:])
    assert np.array_equal(target[HEAD][:, :VOCAB], source[HEAD][:, :VOCAB])
    assert np.array_equal(target[HEAD][:, VOCAB:], before[HEAD][:, VOCAB:])
    moment = fresh.state()[HEAD, "moment2"].numpy()
    assert np.array_equal(moment[:, :VOCAB], optimizer.state()[HEAD, "moment2"].numpy()[:, :VOCAB])
    assert not moment[:, VOCAB:].any()


def test_states_in_host_memory_stay_there(tmp_path, monkeypatch):
    """Paddle's ``set_value`` writes to the current device, wherever the tensor was."""
    params, other = model(), model(padded=14, seed=1)
    optimizer, fresh = trained(params), build_optimizer(OptimizerConfig(), other, UpdatePlace(on_host=True))
    checkpoint, states = saved(tmp_path, params, optimizer), fresh.state()
    monkeypatch.setattr(paddle.Tensor, "set_value", lambda *_: pytest.fail("moved to the device"))
    load_optimizer(states, other, checkpoint)
    expected = optimizer.state()[WORD, "moment1"].numpy()[:VOCAB]
    assert np.array_equal(states[WORD, "moment1"].numpy()[:VOCAB], expected) and expected.any()


def test_a_rank_reads_its_part_also_of_another_padding(tmp_path):
    params = model()
    checkpoint = saved(tmp_path, params)
    first = parameter(WORD, np.zeros((8, 4), np.float32), offset=(0, 0), global_shape=(16, 4))
    second = parameter(WORD, np.full((8, 4), 9, np.float32), offset=(8, 0), global_shape=(16, 4))
    for param in (first, second):
        load_model([param], checkpoint, allow_extra=True)
    source = values(params)[WORD]
    assert np.array_equal(first[1].numpy(), source[:8])
    assert np.array_equal(second[1].numpy()[:2], source[8:10]) and (second[1].numpy()[2:] == 9).all()


def test_differences(tmp_path):
    """The others are in tests/faults/test_strictness.py, by whole runs."""
    params = model()
    optimizer = trained(params)
    checkpoint = saved(tmp_path, params, optimizer)
    small = [parameter(WORD, np.zeros((8, 4), np.float32)), *params[1:]]
    with pytest.raises(CheckpointError, match=r"12 vocabulary entries .* 8 in the model; .* is 10"):
        load_model(small, checkpoint)
    with pytest.raises(CheckpointError, match="it has besides 12: "):
        load_optimizer({}, params, checkpoint)


def test_only_missing_weights_that_are_not_new_are_a_warning(tmp_path, caplog):
    """The adapters of a run that begins are in no checkpoint."""
    params = model()
    checkpoint, (last, _) = saved(tmp_path, params[:-1]), params[-1]
    before = values(params)[last]
    load_model(params, checkpoint, new=[last])
    assert caplog.messages == []
    load_model(params, checkpoint, allow_missing=True)
    assert last in caplog.text
    assert np.array_equal(values(params)[last], before)


def test_bfloat16_goes_through_unchanged_and_converted(tmp_path):
    params = model(dtype="bfloat16")
    checkpoint = saved(tmp_path, params)
    assert checkpoint.entry(WORD).dtype == "BF16"
    for dtype in ("bfloat16", "float32", "float16"):
        other = model(seed=1, dtype=dtype)
        load_model(other, checkpoint)
        tolerance = 0 if dtype != "float16" else 1e-3
        for name, array in values(params).items():
            np.testing.assert_allclose(values(other)[name], array, rtol=tolerance, atol=tolerance / 100)


def test_float32_to_bfloat16_rounds_as_paddle_does(tmp_path):
    params, other = model(), model(seed=1, dtype="bfloat16")
    load_model(other, saved(tmp_path, params))
    for (_, source), (_, target) in zip(params, other, strict=True):
        assert np.array_equal(target.numpy(), source.astype("bfloat16").numpy())


def test_masters_move_between_plans_with_and_without_them(tmp_path):
    half, full = model(dtype="bfloat16"), model(seed=1)
    exact = {name: param.astype("float32").numpy() + 1e-4 for name, param in half}
    masters = [whole(name, array, kind="optimizer", state="master_weight") for name, array in exact.items()]
    checkpoint = open_checkpoint(
        save(tmp_path, tensors=[*model_slices(half), *masters], vocab_size=VOCAB, step=1)
    )
    load_model(full, checkpoint)
    assert all(np.array_equal(values(full)[name], exact[name]) for name in exact)
    wanted = {(name, "master_weight"): paddle.zeros(param.shape) for name, param in half}
    load_optimizer(wanted, half, saved(tmp_path, full, step=2))
    assert all(np.array_equal(wanted[name, "master_weight"].numpy(), exact[name]) for name in exact)


def test_host_array_does_not_copy_on_a_cpu():
    tensor = paddle.ones([5])
    assert host_array(tensor).ctypes.data == tensor.data_ptr()


def draw():
    import random

    mask = paddle.nn.functional.dropout(paddle.ones([64]), 0.5).numpy().tolist()
    return random.random(), np.random.rand(3).tolist(), paddle.rand([3]).numpy().tolist(), mask


def test_random_generators_continue_where_they_were(tmp_path):
    import random

    random.seed(3), np.random.seed(4), paddle.seed(5)
    np.random.standard_normal()  # leaves a cached value
    draw()
    path = save(tmp_path, state={"rng": rng_state()})
    expected = draw()
    random.seed(0), np.random.seed(0), paddle.seed(0)
    assert draw() != expected
    set_rng_state(open_checkpoint(path).state["rng"])
    assert draw() == expected


@pytest.mark.parametrize("break_it", ["python", "numpy", "paddle"])
def test_broken_generator_states_are_refused(break_it):
    state = rng_state()
    bad = {
        "python": {**state["python"], "words": [1, 2]},
        "numpy": {**state["numpy"], "keys": [1]},
        "paddle": {**state["paddle"], "default": [{**state["paddle"]["default"][0], "engine": "1 2 3"}]},
    }
    with pytest.raises(CheckpointError, match="load_rng"):
        set_rng_state({**state, break_it: bad[break_it]})
    with pytest.raises(CheckpointError, match="load_rng"):
        set_rng_state({})
