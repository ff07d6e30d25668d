"""Exports that the tests share: tracing one takes seconds."""

import pytest

from tests.deploy.exports import GPT2_STYLE, STYLES, Exported, make_export


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make_export(tmp_path_factory.mktemp("gpt2_style"), GPT2_STYLE)


@pytest.fixture(scope="session")
def exported_llama(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    moe = {"num_experts": 6, "expert_ffn_size": 40, "first_dense_layers": 1}
    return make_export(tmp_path_factory.mktemp("llama_style"), {**STYLES["llama_style"], "moe": moe})


@pytest.fixture(scope="session")
def exported_latent(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    moe = {
        "num_experts": 6,
        "expert_ffn_size": 32,
        "router": {"score": "sigmoid", "bias": True, "num_groups": 3, "top_groups": 2},
        "shared_experts": {"ffn_size": 40, "gate": True},
    }
    return make_export(tmp_path_factory.mktemp("latent_style"), {**STYLES["latent_style"], "moe": moe})


@pytest.fixture(
    params=["exported", "exported_llama", pytest.param("exported_latent", marks=pytest.mark.slow)]
)
def each(request: pytest.FixtureRequest) -> Exported:
    """Learned positions and a tied head; rotary positions, grouped heads, SwiGLU, a head of its own and a
    mixture of experts in the second layer; the same with latent attention, and DeepSeek's mixtures."""
    return request.getfixturevalue(request.param)
