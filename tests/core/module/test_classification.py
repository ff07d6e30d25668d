"""The classifier against Hugging Face's (recipe: tests/goldens/make_hf_goldens.py)."""

import numpy as np
import paddle
import pytest

from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.core.module.classification import GPTFinetuneModule, mean_loss
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.stage import canonical_parameters
from tests.helpers.hf_weights import hf_to_canonical
from tests.models.gpt_builders import GOLDENS, assign, load_golden, tiny_config


def classifier(model: ModelConfig) -> tuple[GPTFinetuneModule, StagedModel]:
    module = GPTFinetuneModule(RunConfig(Model=model))
    return module, StagedModel(module.stages(LocalFactory()), seed=1)


@pytest.fixture(scope="module")
def golden():
    """Module, model and arrays."""
    hf_config, arrays = load_golden("hf_gpt2")
    weights = {key.removeprefix("weight/"): value for key, value in arrays.items() if "weight/" in key}
    keys = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_classes": 3}
    keys |= {"module": "GPTFinetuneModule"}
    module, model = classifier(ModelConfig(**(model_keys(hf_config) | keys)))
    with np.load(GOLDENS / "hf_classification.npz") as archive:
        expected = dict(archive)
    for name, value in hf_to_canonical(hf_config, weights.__getitem__):
        assign(model, name, value)
    assign(model, "score.weight", expected["score"].T)
    return module, model, expected


def batch_of(expected, **changes):
    arrays = {key: expected[key] for key in ("tokens", "lengths", "labels")}
    arrays |= {"loss_mask": np.ones(4, np.float32), **changes}
    return {name: paddle.to_tensor(array) for name, array in arrays.items()}


def loss_of(module, model, batch):
    return module.loss(module.forward(model, batch), batch, LocalFactory())


def test_scores_and_loss_equal_hugging_face(golden):
    module, model, expected = golden
    batch = batch_of(expected)
    outputs = module.forward(model, batch).numpy()
    assert outputs.shape == expected["logits"].shape == (4, 3)
    np.testing.assert_allclose(outputs, expected["logits"], rtol=0, atol=1e-4)
    assert loss_of(module, model, batch).loss.item() / 4 == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert mean_loss(outputs.astype(np.float64), expected["labels"]) == pytest.approx(
        float(expected["loss"]), rel=1e-5
    )


def test_padding_and_what_does_not_count_change_nothing(golden):
    module, model, expected = golden
    wider = np.concatenate([expected["tokens"], np.full((4, 8), 7)], axis=1)
    mask = np.array([1, 1, 0, 1], np.float32)
    first, second = (
        loss_of(module, model, batch_of(expected, loss_mask=mask, **changes))
        for changes in ({}, {"tokens": wider})
    )
    assert first.rows().count.sum().item() == 3
    assert first.rows().value.sum().item() == pytest.approx(first.loss.item(), rel=1e-6)
    assert second.loss.item() == pytest.approx(first.loss.item(), rel=1e-5)
    others = batch_of(expected, labels=np.array([2, 0, 2, 1]), loss_mask=mask)
    assert loss_of(module, model, others).loss.item() == first.loss.item()


def test_a_number_is_learnt_by_its_squared_error():
    module, model = classifier(tiny_config(module="GPTFinetuneModule", num_classes=1))
    arrays = {"tokens": np.arange(10).reshape(2, 5), "lengths": np.array([5, 2])}
    arrays |= {"labels": np.array([3.5, 1.0], np.float32), "loss_mask": np.ones(2, np.float32)}
    batch = {name: paddle.to_tensor(array) for name, array in arrays.items()}
    outputs = module.forward(model, batch).numpy()
    loss = loss_of(module, model, batch).loss
    assert loss.item() == pytest.approx(float(((outputs[:, 0] - arrays["labels"]) ** 2).sum()), rel=1e-6)
    assert mean_loss(outputs, arrays["labels"]) == pytest.approx(loss.item() / 2, rel=1e-6)


def test_the_head_takes_the_place_of_the_models_own():
    _, model = classifier(tiny_config(module="GPTFinetuneModule", num_classes=2, tie_word_embeddings=False))
    names = set(canonical_parameters(model))
    assert "score.weight" in names
    assert not any(name.startswith("head.") for name in names)
