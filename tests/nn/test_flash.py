"""Flash attention without a GPU: when it is used, the logged reason if not, and the arguments Paddle gets."""

import logging
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.nn import attention_kernels, flash
from ppfleetx.nn.attention_kernels import KernelOptions, attend
from tests.nn.test_layers import RNG, attention64, tensor

V100, T4, A100, A10, L4, H100, B200 = (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)
SERVED = None


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that the device is a GPU of a capability, with these Paddle flags."""

    def set_up(capability, **flags):
        monkeypatch.setattr(flash, "on_gpu", lambda: True)
        monkeypatch.setattr(attention_kernels, "on_card", lambda: True)
        monkeypatch.setattr(flash, "_capability", lambda device: capability)
        monkeypatch.setattr(flash, "_flag", lambda name, default: flags.get(name[6:], default))
        attention_kernels._say_once.cache_clear()

    return set_up


def dropout_of(probability, training):
    dropout = paddle.nn.Dropout(probability)
    dropout.train() if training else dropout.eval()
    return dropout


@pytest.mark.parametrize(
    ("capability", "head_size", "version", "probability", "training", "obstacle"),
    [
        (V100, 64, 2, 0.0, True, "it needs compute capability 8.x or 9.0, this card has 7.0"),
        (T4, 64, 2, 0.0, False, "this card has 7.5"),
        (B200, 64, 2, 0.0, True, "this card has 10.0"),
        (A100, 64, 2, 0.1, True, SERVED),
        (A10, 64, 2, 0.1, True, SERVED),
        (L4, 128, 2, 0.1, True, SERVED),
        (H100, 128, 2, 0.1, True, SERVED),
        (A100, 60, 2, 0.0, True, "a head size that is a multiple of 8, this is 60"),
        (H100, 4, 2, 0.0, False, "a head size that is a multiple of 8, this is 4"),
        (A100, 256, 2, 0.0, True, SERVED),
        (H100, 256, 2, 0.0, True, SERVED),
        (A100, 264, 2, 0.0, False, "its largest head size is 256, this is 264"),
        (A10, 192, 2, 0.0, True, SERVED),
        (A10, 200, 2, 0.0, True, "to train a head size above 192 (this is 200) it needs compute"),
        (L4, 256, 2, 0.0, True, "to train a head size above 192"),
        (A10, 256, 2, 0.0, False, SERVED),
        (H100, 128, 3, 0.0, True, SERVED),
        (H100, 128, 3, 0.1, False, SERVED),
        (H100, 128, 3, 0.1, True, "version 3 (FLAGS_flash_attn_version) has no dropout"),
        (A100, 128, 3, 0.0, True, "its version 3 (FLAGS_flash_attn_version) needs compute capability 9.0"),
    ],
)
def test_where_it_can_serve(
    gpu, monkeypatch, caplog, capability, head_size, version, probability, training, obstacle
):
    gpu(capability, flash_attn_version=version)
    for name in ("reference", "flash"):
        monkeypatch.setattr(attention_kernels, f"{name}_attention", lambda *_, name=name: name)
    query, key = (paddle.zeros([1, 2, *r, 3, head_size], "float16") for r in ([1], []))
    dropout = dropout_of(probability, training)
    monkeypatch.setattr(logging.getLogger("ppfleetx"), "propagate", True)
    with caplog.at_level(logging.INFO):
        taken = [attend(query, key, key, None, dropout, KernelOptions()) for _ in range(2)]
    if obstacle is SERVED:
        assert taken == ["flash"] * 2 and caplog.messages == []
        return
    assert taken == ["reference"] * 2
    (said,) = caplog.messages
    assert said.startswith("attention uses the reference kernel: ") and obstacle in said
    with pytest.raises(ConfigError, match="flash attention cannot run here: ") as refused:
        attend(query, key, key, None, dropout, KernelOptions("flash"))
    assert obstacle in str(refused.value) and "use auto or reference" in str(refused.value)


def test_float32_takes_the_reference(gpu):
    gpu(A100)
    query = paddle.zeros([1, 1, 1, 2, 8])
    obstacle = flash.flash_obstacle(query, dropout_of(0.0, True), has_documents=False)
    assert obstacle == "it needs float16 or bfloat16, the activations are float32"


@pytest.mark.parametrize(
    ("flags", "head_size", "packed", "version"),
    [
        ({}, 64, False, 2),
        ({"flash_attn_version": 3}, 64, False, 3),
        ({"flash_attn_version": 3}, 64, True, 3),
        ({"flash_attn_version": 3, "cudnn_deterministic": True}, 64, False, 2),
        ({"flash_attn_version": 3, "cudnn_deterministic": True}, 64, True, 3),
        ({"flash_attn_version": 3, "cudnn_deterministic": True}, 192, True, 2),
    ],
)
def test_the_version_is_the_one_paddle_takes(gpu, flags, head_size, packed, version):
    gpu(H100, **flags)
    assert flash.flash_version(head_size, has_documents=packed) == version


@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="flash may be able to run")
def test_it_is_refused_in_words_on_a_cpu():
    arrays = [paddle.zeros([1, 1, 1, 2, 8]), paddle.zeros([1, 1, 2, 8]), paddle.zeros([1, 1, 2, 8])]
    with pytest.raises(ConfigError, match="flash attention cannot run here: it needs a GPU"):
        attend(*arrays, None, paddle.nn.Dropout(0.0), KernelOptions("flash"))


@pytest.mark.parametrize("kernel", ["auto", "flash"])
def test_queries_after_cached_keys_take_the_reference(monkeypatch, kernel):
    monkeypatch.setattr(attention_kernels, "flash_obstacle", lambda *_, **__: None)
    monkeypatch.setattr(attention_kernels, "flash_attention", lambda *_: pytest.fail("flash was called"))
    query, (key, value) = RNG.normal(size=(2, 2, 3, 1, 8)), RNG.normal(size=(2, 2, 2, 6, 8))
    out = attend(
        tensor(query), tensor(key), tensor(value), None, paddle.nn.Dropout(0.0), KernelOptions(kernel)
    )
    expected = attention64(query, key, value, np.ones((1, 1, 1, 6), bool))
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_what_paddle_is_called_with(monkeypatch, packed):
    """The reference computes the results of Paddle's functions. Like version 3, the stand-ins do not accept
    ``training=False``, so in evaluation the dropout probability must be 0."""
    calls = []

    def run(q, k, v, limits, *, dropout, causal, training):
        assert causal and training
        calls.append((dropout, limits is not None))
        mask = paddle.tril(paddle.ones([1, 1, 6, 6], "bool"))
        if limits is not None:
            rows = paddle.arange(6, dtype="int32").reshape([1, 1, 6, 1])
            mask = paddle.logical_and(mask, rows < limits.transpose([0, 1, 3, 2]))
        groups, repeat = k.shape[2], q.shape[2] // k.shape[2]
        q64 = q.numpy().transpose(0, 2, 1, 3).reshape(2, groups, repeat, 6, 8)
        k64, v64 = (t.numpy().transpose(0, 2, 1, 3) for t in (k, v))
        out = attention64(q64, k64, v64, np.broadcast_to(mask.numpy(), (2, 1, 6, 6)))
        return tensor(out.reshape(2, -1, 6, 8).transpose(0, 2, 1, 3))

    fakes = SimpleNamespace(
        flash_attention=lambda q, k, v, **kw: (run(q, k, v, None, **kw), None),
        flashmask_attention=lambda q, k, v, limits, **kw: run(q, k, v, limits, **kw),
    )
    monkeypatch.setattr(flash.F, "flash_attention", fakes)
    monkeypatch.setattr(attention_kernels, "flash_obstacle", lambda *_, **__: None)
    query, key, value = (tensor(RNG.normal(size=s)) for s in [(2, 2, 3, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)])
    starts = paddle.to_tensor([[0, 0, 0, 3, 3, 3], [0] * 6], dtype="int32") if packed else None
    for training, probability in ((True, 0.1), (False, 0.0)):
        dropout = dropout_of(0.1, training)
        out = attend(query, key, value, starts, dropout, KernelOptions("auto"))
        calm = paddle.nn.Dropout(0.0)
        expected = attend(query, key, value, starts, calm, KernelOptions("reference"))
        np.testing.assert_allclose(out.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)
        assert calls[-1] == (probability, packed)
