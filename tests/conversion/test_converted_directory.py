"""What a conversion leaves can be used as it is, from anywhere, also after it has been moved.

Export and server load the checkpoint as generation does (``core.generate.load_generator``).
"""

import shutil

import pytest
import yaml

from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.commands.evaluate import evaluate, read_windows
from ppfleetx.commands.generate import find_tokenizer, load_generator
from ppfleetx.config.errors import DataError
from ppfleetx.config.loader import load_config
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.conversion.huggingface.directory import write_hf
from ppfleetx.distributed.context import ParallelContext
from tests.conversion import hf_dirs
from tests.models.gpt_builders import LLAMA_STYLE, tiny_config

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CTX = ParallelContext.single()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A stretched Llama with a tokenizer whose end of text is Llama's, converted and then moved."""
    root = tmp_path_factory.mktemp("converted")
    sizes = {"vocab_size": 260, "vocab_size_divisible_unit": 4, "max_position_embeddings": 64}
    model = tiny_config(**LLAMA_STYLE, **sizes, rope_scaling=YARN)
    write_hf(hf_dirs.random_tensors(model), model, root / "hf")
    hf_dirs.write_tokenizer(root / "hf", eos="</s>")
    convert(Conversion("hf", "ppfleetx", root / "hf", root / "first"))
    shutil.move(root / "first", root / "moved")
    return root / "moved"


def configuration(converted, ckpt_dir, *overrides, config=None):
    short = ["Global.device=cpu", "Generation.max_dec_len=4", *overrides]
    return load_config(config or converted, [f"Engine.save_load.ckpt_dir={ckpt_dir}", *short])


def test_generation_and_evaluation_take_the_directory(converted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text of some thirty tokens is enough")
    texts, losses = [], []
    for place in (converted, converted / "latest", converted / "epoch_0_step_0"):
        cfg = configuration(converted, place)
        assert cfg.Model.rope_scaling.type == "yarn"
        generator = load_generator(cfg, CTX)
        assert generator.tokenizer.eod_token == "</s>"
        [[found]] = generator.generate(["Hello"], cfg.Generation)
        texts.append(found.ids)
        options = ["Offline_Eval.eval_path=text.txt", "Offline_Eval.max_seq_len=32"]
        cfg = configuration(converted, place, "Model.module=GPTEvalModule", *options)
        losses.append(evaluate(cfg, CTX, read_windows(cfg))[0])
    assert texts[0] == texts[1] == texts[2]
    assert losses[0] == losses[1] == losses[2]


def test_a_configuration_without_tokenizer_takes_the_one_that_is_stored(converted, tmp_path, caplog):
    """With its own end of text, and by whatever name the checkpoint is reached."""
    tree = yaml.safe_load((converted / "config.yaml").read_text())
    moved = tree.pop("Data")["tokenizer"]["dir"]
    assert moved == str(converted.parent / "first" / "tokenizer")
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
    checkpoint = open_checkpoint(converted / "epoch_0_step_0")
    cfg = configuration(converted, converted, config=tmp_path / "own.yaml")
    assert find_tokenizer(cfg, checkpoint).eod_token == "</s>"
    with caplog.at_level("WARNING", logger="ppfleetx"):
        assert find_tokenizer(configuration(converted, converted), checkpoint).eod_token == "</s>"
    assert f"there is no {moved} (Data.tokenizer.dir)" in caplog.text
    # What is typed is a mistake, and no trace of an earlier place.
    typed = configuration(converted, converted, "Data.tokenizer.dir=no/such")
    with pytest.raises(DataError, match="no/such"):
        find_tokenizer(typed, checkpoint)


@pytest.mark.parametrize("how", [{"merge": True}, {"plan": ParallelPlan(mp=2)}], ids=["merged", "cut"])
def test_a_merged_or_cut_checkpoint_has_its_configuration_beside_it(converted, tmp_path, how):
    convert(Conversion("ppfleetx", "ppfleetx", converted, tmp_path / "out", **how))
    cfg = configuration(tmp_path / "out", tmp_path / "out")
    assert cfg.Model == load_config(converted).Model
    load_generator(cfg, CTX)
    # Where none lay beside the checkpoint, the one it was saved with is written out.
    (tmp_path / "bare").mkdir()
    shutil.copytree(converted / "epoch_0_step_0", tmp_path / "bare" / "epoch_0_step_0")
    convert(Conversion("ppfleetx", "ppfleetx", tmp_path / "bare", tmp_path / "again", **how))
    assert load_config(tmp_path / "again").Model == ModelConfig(**cfg.Model.model_dump())
