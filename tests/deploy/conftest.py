"""Exports that the tests share: tracing one takes seconds."""

import pytest

from tests.deploy.exports import GPT2_STYLE, STYLES, Exported, make_export


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make_export(tmp_path_factory.mktemp("gpt2_style"), GPT2_STYLE)


@pytest.fixture(scope="session")
def exported_llama(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make_export(tmp_path_factory.mktemp("llama_style"), STYLES["llama_style"])


@pytest.fixture(scope="session")
def exported_latent(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make_export(tmp_path_factory.mktemp("latent_style"), STYLES["latent_style"])


@pytest.fixture(params=["exported", "exported_llama", "exported_latent"])
def each(request: pytest.FixtureRequest) -> Exported:
    """Learned positions and a tied head; rotary positions, grouped heads, SwiGLU and a head of its own; the
    same with latent attention."""
    return request.getfixturevalue(request.param)
