"""What is refused before Paddle is loaded, in words that can be read apart."""

import pytest

from ppfleetx.commands import initialize
from ppfleetx.commands.initialize import start_with
from ppfleetx.config.errors import CheckpointError, ConfigError, DataError
from ppfleetx.config.loader import load_config
from ppfleetx.utils import launcher_env
from ppfleetx.utils.device_support import not_supported_reasons

PRETRAIN = "ppfleetx/configs/nlp/gpt/pretrain_gpt_345M_single_card.yaml"
ON_CPU = ["Global.device=cpu", "Engine.mix_precision.enable=False"]


def test_several_refusals_stand_on_lines_of_their_own(monkeypatch) -> None:
    cfg = load_config(PRETRAIN, ["Global.device=cpu", "Engine.mix_precision.enable=True"])
    found = not_supported_reasons(cfg, "cpu")
    monkeypatch.setattr(
        initialize, "not_supported_reasons", lambda *_: [*found, "Model.other = 1: not built"]
    )
    with pytest.raises(ConfigError, match="is valid, but cannot run yet:\n") as caught:
        start_with(cfg)
    head, *reasons = str(caught.value).splitlines()
    assert head.endswith(":")
    assert [reason.split()[0] for reason in reasons] == ["Engine.mix_precision.enable", "Model.other"]


def test_a_corpus_that_is_not_there_names_its_key_and_how_one_is_made(tmp_path) -> None:
    for given, words in (
        ([f"Data.Train.dataset.input_dir={tmp_path / 'none'}"], r"\(-o override 3\): no corpus at"),
        ([f"Data.Train.dataset.input_dir={tmp_path}"], r"\(-o override 3\): no corpus in"),
        ([], r"\(.*\.yaml:\d+\): no corpus at"),
    ):
        with pytest.raises(DataError, match=rf"^Data.Train.dataset.input_dir {words}.*ppfleetx prepare"):
            start_with(load_config(PRETRAIN, [*ON_CPU, *given]), reads=("Train",))


def test_a_tokenizer_that_is_not_there_names_its_key_and_where_gpt2s_is(tmp_path) -> None:
    recipe = "ppfleetx/configs/nlp/gpt/finetune_gpt_345M_single_card_sft.yaml"
    cfg = load_config(recipe, [*ON_CPU, f"Data.tokenizer.dir={tmp_path / 'none'}"])
    said = r"Data.tokenizer.dir \(-o override 3\): no tokenizer at .*huggingface.co/openai-community/gpt2"
    with pytest.raises(DataError, match=said):
        start_with(cfg, reads=("Train",))


def test_without_data_the_key_is_named() -> None:
    from ppfleetx.commands.train import evaluate, train
    from ppfleetx.distributed.context import ParallelContext

    text = r"\. For the perplexity of a text: `ppfleetx eval MODEL --text FILE`"
    for program, section, instead in ((train, "Train", ""), (evaluate, "Eval", text)):
        cfg = load_config("ppfleetx/configs/debug/gpt_nano.yaml", [f"Data.{section}=null"])
        key = f"Data.{section}.dataset.input_dir"
        with pytest.raises(ConfigError, match=f"^{key}: names no data, .* -o {key}=PREFIX{instead}$"):
            program(cfg, ParallelContext.single())


@pytest.mark.parametrize("value", ["eight", ""])
def test_the_launchers_number_is_a_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", value)
    with pytest.raises(ConfigError, match=r"PADDLE_TRAINERS_NUM.*is not a number"):
        launcher_env.world_size()


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "8", "LOCAL_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"},
        {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3"},
    ],
)
def test_processes_of_another_launcher_do_not_train_alone(monkeypatch, variables):
    monkeypatch.delenv("PADDLE_TRAINERS_NUM", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"started 8 processes, .*paddle\.distributed\.launch"):
        start_with(load_config(PRETRAIN, ON_CPU), reads=("Train",))
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "1")
    launcher_env.refuse_other_launchers()
    monkeypatch.delenv("PADDLE_TRAINERS_NUM")
    monkeypatch.setenv(next(iter(variables)), "1")
    launcher_env.refuse_other_launchers()


def test_weights_that_are_not_there_name_their_key(tmp_path) -> None:
    sizes = ["Model.lora.rank=2", f"Model.lora.base={tmp_path}/gone", "Data.Train=null", "Data.Eval=null"]
    cfg = load_config(PRETRAIN, [*ON_CPU, *sizes])
    with pytest.raises(
        CheckpointError, match=r"^Model.lora.base = .*gone.*have moved: -o Model.lora.base=DIR"
    ):
        start_with(cfg)
    cfg = load_config(PRETRAIN, [*ON_CPU, f"Engine.save_load.ckpt_dir={tmp_path}/gone"])
    with pytest.raises(CheckpointError, match=r"^Engine.save_load.ckpt_dir = .*there is no directory"):
        start_with(cfg)
