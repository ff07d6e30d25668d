"""A configuration from one number: valid at every depth and number of cards, by the rules of its file."""

import pytest
import yaml

from ppfleetx.commands.check import check_report
from ppfleetx.commands.main import call
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.planner.recipe import RecipeInputs, recipe

DEPTHS = range(2, 31)
CARDS = range(1, 65)


def checked(inputs, path):
    """The recipe's configuration, after everything that `ppfleetx check` looks at."""
    made = recipe(inputs)
    path.write_text(made.yaml())
    cfg = load_config(path, world_size=inputs.cards)
    report = check_report(cfg)
    assert "it fits" in report
    assert not any(line.startswith(("missing", "not yet")) for line in report.splitlines()), report
    assert cfg.plan == made.prediction.job.plan
    assert cfg.batch.micro_batch_size == made.prediction.job.micro_batch
    return cfg


@pytest.mark.slow
def test_every_depth_and_every_number_of_cards_is_valid(tmp_path):
    """Each number of cards with some depth, each depth with some numbers of cards."""
    pairs = {(DEPTHS[7 * cards % len(DEPTHS)], cards) for cards in CARDS}
    assert {depth for depth, _ in pairs} == set(DEPTHS)
    for depth, cards in sorted(pairs):
        checked(RecipeInputs(depth, cards, "A100-80GB"), tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("card", "precision"), [("V100-32GB", "float16"), ("H100-80GB", "bfloat16"), ("910B-64GB", "bfloat16")]
)
def test_the_precision_is_one_that_the_card_has(card, precision, tmp_path):
    mixed = checked(RecipeInputs(12, 8, card), tmp_path / "recipe.yaml").Engine.mix_precision
    assert mixed.enable and mixed.dtype == precision


def test_what_follows_from_the_depth(tmp_path):
    cfg = checked(RecipeInputs(12, 8, "A100-80GB"), tmp_path / "recipe.yaml")
    model = cfg.Model
    assert (model.num_layers, model.hidden_size, model.head_size) == (12, 768, 64)
    tokens = cfg.Engine.max_steps * cfg.batch.global_batch_size * 2048
    assert tokens == pytest.approx(20 * RecipeInputs(12, 8, "A100-80GB").num_params, rel=1e-3)
    # DeepSeek LLM, equations 1 and 2, by hand.
    compute = 12 * 768 * (72 * 768 + 12 * 2048) * tokens
    assert cfg.Optimizer.lr.max_lr == pytest.approx(0.3118 * compute**-0.125, rel=5e-3)
    wanted = 0.2920 * compute**0.3271
    assert 2**-0.5 <= cfg.batch.global_batch_size * 2048 / wanted <= 2**0.5


def test_a_trial_of_a_few_steps_follows_the_schedule_of_the_whole_run(tmp_path):
    cfg = checked(RecipeInputs(4, 1, "CPU"), path := tmp_path / "recipe.yaml")
    assert load_config(path, ["Engine.max_steps=2"]).Optimizer.lr == cfg.Optimizer.lr


def test_rates_have_three_digits():
    lines = [line.strip() for line in recipe(RecipeInputs(11, 8, "H100-80GB")).yaml().splitlines()]
    assert "max_lr: 0.0017" in lines and "min_lr: 0.00017" in lines  # 0.0017 / 10 is 0.00016999999999999999


def test_deeper_models_and_longer_runs_have_lower_rates_and_larger_batches():
    by_depth = [RecipeInputs(depth, 1, "A100-80GB") for depth in DEPTHS]
    by_tokens = [RecipeInputs(12, 1, "A100-80GB", tokens) for tokens in (5, 20, 100)]
    for dials in (by_depth, by_tokens):
        rates, batches = [inputs.learning_rate for inputs in dials], [inputs.batch for inputs in dials]
        assert rates == sorted(rates, reverse=True) and batches == sorted(batches)


def test_the_command_writes_a_file_and_says_what_it_costs(tmp_path, capsys):
    path = tmp_path / "d4.yaml"
    words = ["--depth", "4", "--cards", "2xA100-80GB", "--price", "2", "--vocab-size", "8192"]
    call("recipe", [*words, "--write", str(path)])
    printed = capsys.readouterr().out
    assert "card-hours, which cost" in printed and str(path) in printed
    sections = yaml.safe_load(path.read_text())
    assert sections["Model"]["vocab_size"] == 8192
    call("recipe", words)
    assert yaml.safe_load(capsys.readouterr().out) == sections
    with pytest.raises(ConfigError, match="--write"):
        call("recipe", [*words, "--write", str(path)])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--cards", "A100-80GB"], "--cards"),
        (["--cards", "0xA100-80GB"], "--cards"),
        (["--cards", "8xA100-80"], "--cards"),
        (["--cards", "999999xA100-80GB"], "--cards = 999999: plans are searched for at most"),
        (["--depth", "60", "--cards", "1xV100-16GB"], "--cards"),
        (["--tokens-per-param", "0"], "--tokens-per-param"),
        (["--tokens-per-param", "1e300"], "--tokens-per-param"),
        (["--depth", "100000"], "num_layers = 100000"),
        (["--seq-len", "100000000000"], "max_position_embeddings"),
        (["--price", "nan"], "--price"),
    ],
)
def test_mistakes_name_the_option(words, key):
    with pytest.raises(ConfigError, match=key):
        call("recipe", ["--depth", "4", *words])
