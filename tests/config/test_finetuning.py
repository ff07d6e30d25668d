"""Rules of finetuning: each mistake is named before anything is loaded."""

import pytest

from ppfleetx.commands.check import check_report
from ppfleetx.commands.initialize import start_with
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.ineffective_options import without_effect
from ppfleetx.config.loader import load_config
from ppfleetx.utils.device_support import not_supported_reasons
from tests.config.test_shipped import GPT

GLUE = GPT / "finetune_gpt_345M_single_card_glue.yaml"
SFT = GPT / "finetune_gpt_345M_single_card_sft.yaml"
ON_CPU = ["Global.device=cpu", "Engine.mix_precision.enable=False"]


@pytest.mark.parametrize("path", [GLUE, SFT], ids=lambda path: path.stem)
def test_shipped_recipes_can_run(path):
    cfg = load_config(path, ON_CPU)
    assert not_supported_reasons(cfg, "cpu") == []
    assert without_effect(cfg) == []


def test_the_head_has_the_tasks_classes():
    assert load_config(GLUE).Model.num_classes == 2
    names = ["Data.Train.dataset.name=MNLI", "Data.Eval.dataset.name=MNLI"]
    assert load_config(GLUE, [*names, "Data.Eval.dataset.split=dev_matched"]).Model.num_classes == 3


@pytest.mark.parametrize("mode", ["Train", "Eval", "Test"])
def test_any_part_may_be_read_for_anything(mode):
    """Whether it has labels is known when it is read (MRPC's and CoLA's test parts may have them)."""
    names = [f"Data.{part}.dataset.name=MRPC" for part in {"Train", "Eval", mode}]
    assert load_config(GLUE, [*names, f"Data.{mode}.dataset.split=test"]).Model.num_classes == 2


@pytest.mark.parametrize(
    ("positions", "given", "length"), [(512, [], 512), (4096, [], 1024), (512, ["max_seq_len=64"], 64)]
)
@pytest.mark.parametrize("mode", ["Train", "Eval", "Test"])
def test_a_length_that_nobody_chose_fits_the_model(tmp_path, mode, positions, given, length):
    sizes = "{vocab_size: 64, hidden_size: 8, num_layers: 1, num_attention_heads: 1, "
    sections = f"Global: {{local_batch_size: 1}}\nModel: {sizes}max_position_embeddings: {positions}}}\n"
    (tmp_path / "c.yaml").write_text(sections)
    overrides = [f"Data.{mode}.dataset.{text}" for text in ("input_dir=x", *given)]
    cfg = load_config(tmp_path / "c.yaml", overrides)
    assert getattr(cfg.Data, mode).dataset.max_seq_len == length


def test_the_report_tells_what_trains():
    report = check_report(load_config(GLUE, ["Model.lora.rank=8"]))
    # 24 layers x rank 8 x (1024 + 3072 + 2 x 1024 + 2 x (1024 + 4096)), and 2 x 1024 for the head
    assert f"{24 * 8 * (1024 + 3072 + 2 * 1024 + 2 * 5120) + 2048:,}" in report


def test_a_missing_tokenizer_is_said_by_the_report_and_refused_by_the_run():
    for path in (GLUE, SFT):
        cfg = load_config(path, [*ON_CPU, "Data.tokenizer=null"])
        assert "missing        Data.tokenizer: the texts of Data.Train need one" in check_report(cfg)
        with pytest.raises(ConfigError, match=r"Data.tokenizer: names no files.*gpt2"):
            start_with(cfg, reads=("Train", "Eval"))
        assert "missing" not in check_report(load_config(path, ON_CPU))


@pytest.mark.parametrize(
    ("path", "overrides", "words"),
    [
        (GLUE, ["Distributed.pp_degree=2"], "Distributed.pp_degree = 2 .* pp must be 1"),
        (GLUE, ["Distributed.sep_degree=2"], "Distributed.sep_degree = 2 .* sep must be 1"),
        (GLUE, ["Model.num_classes=3"], "Model.num_classes = 3 .* SST2 has 2 classes"),
        (
            GLUE,
            ["Data.Train.dataset.name=RTE"],
            "Data.Eval.dataset.name .* the same task everywhere",
        ),
        (GLUE, ["Data.Train.dataset.split=dev_matched"], "SST2 wants one of train, dev, test"),
        (
            GLUE,
            ["Model.module=GPTModule"],
            "is learned by Model.module = GPTFinetuneModule",
        ),
        (GLUE, ["Engine.eval_freq=0"], "the best is found by evaluating"),
        (GLUE, ["Data.Train.dataset.eod_mask_loss=True"], "SST2 has no such option; only GPTDataset has"),
        (GLUE, ["Data.Train.dataset.prompt_field=q"], "SST2 has no such option; PromptResponseDataset has"),
        (GLUE, ["Data.Train.dataset.input_dir=[a, b]"], "SST2 reads one directory"),
        (SFT, ["Engine.save_load.keep_best=metric"], "only GPTFinetuneModule has a metric"),
        (SFT, ["Data.Train.dataset.split=[1, 2]"], "PromptResponseDataset wants a file's name"),
        (
            SFT,
            ["Model.lora.targets=['*.attention.qvk']"],
            r"Model.lora.targets .* fits no linear of the blocks; the nearest are \*\.attention\.qkv",
        ),
        (SFT, ["Model.lora.targets=['decoder.layers.24.*']"], "fits no linear of the blocks"),
        (SFT, ["Model.lora.targets=[]"], "for none at all set Model.lora to null"),
        (SFT, ["Model.lora.rank=0"], "Model.lora.rank = 0 .* must be an integer of at least 1"),
    ],
)
def test_mistakes(path, overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_config(path, overrides)
