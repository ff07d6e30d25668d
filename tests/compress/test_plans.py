"""A quantized checkpoint computes the same under every plan, or is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppfleetx.commands.checkpoint_verbs import Quantize
from ppfleetx.commands.quantize import quantize
from ppfleetx.config.loader import load_config
from tests.compress.plans import adapt, use
from tests.compress.runs import MODELS, write_run
from tests.helpers.ranks import RanksFailedError

PLANS = {
    "mp2": ["Distributed.mp_degree=2"],
    "mp2_sequences": ["Distributed.mp_degree=2", "Model.sequence_parallel=True"],
    "pp2": ["Distributed.pp_degree=2"],
    "sharding2": ["Distributed.sharding.sharding_degree=2", "Distributed.sharding.sharding_stage=2"],
    "sep2": ["Distributed.sep_degree=2"],
}
SHARDING_3 = ["Distributed.sharding.sharding_degree=2", "Distributed.sharding.sharding_stage=3"]
FORMS = {"int8": {"to": "int8", "group": 8}, "int4": {"to": "int4", "group": 8}}


def quantized(run_dir: Path, output: Path, **options: object) -> Path:
    """The configuration of a quantized checkpoint, which names it."""
    step = quantize(Quantize(checkpoint=str(run_dir), output=str(output), **options))
    config = output.with_suffix(".yaml")
    place = f"Engine: {{save_load: {{ckpt_dir: '{step}'}}}}\n"
    config.write_text(f"{(step / 'config.yaml').read_text()}\n{place}")
    return config


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[tuple[str, str], str]:
    """Configuration of each style in each form."""
    configs = {}
    for style, model in MODELS.items():
        room = tmp_path_factory.mktemp(style)
        run_dir = write_run(room / "run", model)
        for form, options in FORMS.items():
            configs[style, form] = str(quantized(run_dir, room / form, **options))
    return configs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("style", MODELS)
def test_two_ranks_compute_what_one_process_does(pools, small, style, form) -> None:
    config = small[style, form]
    alone = use(config, ["Generation.max_dec_len=6"], 1, True)
    for name, plan in PLANS.items():
        generates = name in ("mp2", "sharding2")
        ranks = pools(2).run(
            "tests.compress.plans:use",
            timeout=120.0,
            config=config,
            plan=["Generation.max_dec_len=6", *plan],
            world=2,
            generate=generates,
        )
        losses = [rank["loss"] for rank in ranks if rank["loss"] is not None]
        assert losses and all(abs(loss - alone["loss"]) < 2e-5 for loss in losses), (name, losses, alone)
        if generates:
            assert ranks[0]["ids"] == alone["ids"], name


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("style", "form"), [("gpt2_style", "int4"), ("llama_style", "int8")])
def test_adapters_beside_quantised_weights_train_as_on_one_card(pools, small, style, form, tmp_path) -> None:
    config = tmp_path / "adapted.yaml"
    config.write_text(Path(small[style, form]).read_text().replace("ckpt_dir", "init_from"))
    alone = adapt(str(config), [], 1)
    assert alone[-1] < alone[0] - 0.01
    for name, plan in {**PLANS, "sharding3": SHARDING_3}.items():
        ranks = pools(2).run(
            "tests.compress.plans:adapt", timeout=120.0, config=str(config), plan=plan, world=2
        )
        for losses in ranks:
            assert losses == pytest.approx(alone, abs=2e-5), name


def test_groups_that_ranks_would_share(pools, tmp_path) -> None:
    run_dir = write_run(tmp_path / "run", MODELS["gpt2_style"])
    config = quantized(run_dir, tmp_path / "small", to="int4", group=16)
    assert load_config(config).Compress.Weights.group_size == 16
    with pytest.raises(RanksFailedError, match=r"groups of 16 do not divide 24 .*leaves 24 of 48 to a rank"):
        pools(2).run(
            "tests.compress.plans:use",
            timeout=120.0,
            config=str(config),
            plan=PLANS["mp2"],
            world=2,
            generate=False,
        )
