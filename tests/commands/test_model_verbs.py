"""Verbs that take a model's directory and nothing else, whoever wrote it."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import yaml

import ppfleetx
from ppfleetx.api.mindformers_pipeline import Trainer
from ppfleetx.api.model import GPT
from ppfleetx.checkpoint.config_and_tokenizer import documents_of
from ppfleetx.commands.launching import without_launch_options
from ppfleetx.commands.main import call
from ppfleetx.commands.resolve_model import ResolvedModel, resolve_model, shared_directory
from ppfleetx.config.errors import CheckpointError, ConfigError, UserError
from ppfleetx.config.loader import load_config
from ppfleetx.config.reading.overrides import Setting
from ppfleetx.config.reading.parse import Sections
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from tests.checkpoint.checkpoints import save
from tests.conversion.test_fleetx import save as save_fleetx
from tests.conversion.test_fleetx import theirs
from tests.helpers import programs
from tests.helpers.texts import small_tokenizer
from tests.models.gpt_builders import build, save_network

ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # of debug/gpt_nano
GENERATION = {"decode_strategy": "greedy_search", "max_dec_len": 6}
PROMPT = "The quick"
LONG = "Data.Train.dataset.max_seq_len=4096"


def verb(*words: object, cwd: Path) -> str:
    """What a verb prints, run in a process of its own."""
    done = programs.run([sys.executable, "-m", "ppfleetx", *map(str, words)], timeout=120, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model as every kind of directory, and the corpus it names."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = small_tokenizer()
    with IndexedDatasetWriter(root / "corpus", np.uint16) as writer:
        for _ in range(20):
            writer.add_document(np.arange(100), [100])
    dataset = {"input_dir": str(root / "corpus"), "split": [8, 2, 0], "max_seq_len": 32}
    tree = {
        "Global": {"device": "cpu", "local_batch_size": 2},
        "Engine": {"save_load": {"output_dir": "first"}},
        "Model": MODEL,
        "Data": {"Train": {"dataset": dataset}, "Eval": {"dataset": dataset}},
        "Generation": GENERATION,
    }
    (root / "run.yaml").write_text(json.dumps(tree))
    cfg = load_config(root / "run.yaml")
    network, config = build(ModelConfig(**MODEL, initializer_range=0.3), 5), cfg.model_dump(mode="json")
    documents = documents_of(cfg, tokenizer)
    save_network(root / "run", network, vocab_size=512, config=config, documents=documents)
    older = {**config, "Generation": {**config["Generation"], "prompt": "another's", "seed": 5}}
    save_network(root / "older", network, vocab_size=512, config=older)
    tokenizer.save(root / "older/tokenizer")
    save_network(root / "mute", network, vocab_size=512)
    save_fleetx(root / "fleetx", {theirs(p.info.name): p.numpy() for p in network.parameters()})
    tokenizer.save(root / "fleetx/tokenizer")
    convert(Conversion("ppfleetx", "hf", root / "run", root / "hf"))
    return root


@pytest.fixture(scope="module")
def text(place: Path) -> str:
    """What the model writes, as its run's directory says it."""
    printed = verb("generate", "run", PROMPT, cwd=place)
    assert printed.startswith("Prompt: ") or "Prompt: " in printed
    return printed[printed.index("Prompt: ") :]


@pytest.mark.parametrize(
    "model", ["run/epoch_0_step_4", "run/latest", "run/epoch_0_step_4/mp_00_sharding_00_pp_00", "older", "hf"]
)
def test_every_directory_writes_the_same(place: Path, text: str, model: str) -> None:
    """Hugging Face's too: its generation defaults are ours with the tokenizer's end, so -o says the rest."""
    more = [f"-oGeneration.{key}={value}" for key, value in GENERATION.items()] if model == "hf" else []
    printed = verb("generate", model, *more, PROMPT, cwd=place)
    assert printed.endswith(text)
    assert ("is Hugging Face's; it is converted into" in printed) == (model == "hf")
    assert ("was saved by an earlier version" in printed) == (model == "older")


def test_the_prompt_of_whoever_saved_a_checkpoint_is_not_continued(place: Path) -> None:
    with ExitStack() as stack:
        config = resolve_model(place / "older", stack).config
        assert isinstance(config, Sections)
        said = config.values["Generation"]
    assert said["max_dec_len"] == GENERATION["max_dec_len"]
    assert not {"prompt", "prompt_file", "seed"} & set(said)


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("Engine", "Engine: {save_load: {output_dir: mine, overwrite: True}}"),
        ("Serve", "Serve: {host: 0.0.0.0}"),
        ("_base_", "_base_: ../../mine.yaml"),
        ("Global.flags", "Global: {local_batch_size: 1, flags: {FLAGS_x: 1}}"),
        ("Generation.prompt_file", "Generation: {prompt_file: ../../mine.txt}"),
    ],
)
def test_a_checkpoint_describes_its_model_and_no_more(tmp_path: Path, key: str, more: str) -> None:
    """The first configuration is what a run writes; the second one also acts on its user's behalf."""
    (tmp_path / "run.yaml").write_text(json.dumps({"Global": {"local_batch_size": 1}, "Model": MODEL}))
    documents = documents_of(load_config(tmp_path / "run.yaml"), None)
    with ExitStack() as stack:
        assert resolve_model(save(tmp_path / "sound", documents=documents), stack).config is not None
    [name] = documents
    said = yaml.safe_load(documents[name]) | yaml.safe_load(more)
    foreign = save(tmp_path / "foreign", documents={name: yaml.safe_dump(said).encode()})
    with ExitStack() as stack, pytest.raises(ConfigError, match="may describe the model") as caught:
        resolve_model(foreign, stack)
    assert caught.value.key == key
    with ExitStack() as stack:  # who names a configuration decides
        assert resolve_model(foreign, stack, with_config=False).checkpoint == foreign


def test_fleetx_has_the_network_of_a_shipped_configuration(place: Path, text: str) -> None:
    more = [f"-oGeneration.{key}={value}" for key, value in GENERATION.items()]
    printed = verb("generate", "fleetx", *more, "-o", "Model.scale_qk_by_layer_num=True", PROMPT, cwd=place)
    assert printed.endswith(text) and "it has the sizes of debug/gpt_nano" in printed


def test_a_moved_checkpoint_needs_nothing_of_its_run(place: Path, text: str, tmp_path: Path) -> None:
    shutil.copytree(place / "run/epoch_0_step_4", tmp_path / "alone")
    assert verb("generate", "alone", PROMPT, "-o", "Global.device=cpu", cwd=tmp_path).endswith(text)


def loss_in(line: str) -> float:
    """The loss that a line of a log tells."""
    return float(line.partition(", loss: ")[2].split(",")[0])


def test_evaluation_export_and_finetuning_need_nothing_else(place: Path, text: str, tmp_path: Path) -> None:
    loss = loss_in(verb("eval", place / "run", cwd=tmp_path).splitlines()[-1])
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9)
    table = verb("eval", place / "run", "--text", "text.txt", "--output", "result", cwd=tmp_path)
    assert "adjusted ppl" in table and json.loads((tmp_path / "result/eval_result.json").read_text())["loss"]
    verb("export", place / "run", "--output", "exported", cwd=tmp_path)
    assert verb("infer", "exported", PROMPT, cwd=tmp_path).endswith(text)
    short = ["-o", "Engine.max_steps=1", "-o", "Engine.eval_freq=1", "-o", "Engine.accumulate_steps=1"]
    log = verb("finetune", "--from", place / "run", "--output", "new", *short, cwd=tmp_path)
    assert f"with the weights of {place / 'run/epoch_0_step_4'}" in log
    before = next(line for line in log.splitlines() if "eval at global step 0" in line)
    assert loss_in(before) == loss
    assert "Prompt: x" in verb("generate", "new", "x", cwd=tmp_path)
    further = ["finetune", "--from", place / "run", "--output", "new", "--max-steps", 2, *short[2:]]
    log = verb(*further, cwd=tmp_path)
    assert "continues from epoch_0_step_1 to step 2" in log and "global step 2," in log


@pytest.mark.parametrize("kind", ["hf", "run"])
def test_a_run_goes_on_without_what_it_started_from(place: Path, tmp_path: Path, kind: str) -> None:
    """Also without its tokenizer, which for Hugging Face's files is in the conversion that is removed."""
    shutil.copytree(place / kind, tmp_path / "start")
    given = ["--from", "start", "-c", place / "run.yaml", "--output", "new", "--max-steps", "1"]
    verb("finetune", *given, "-o", "Data.Eval=null", cwd=tmp_path)
    shutil.rmtree(tmp_path / "start")
    assert "global step 2," in verb("train", "-c", "new", "--max-steps", "2", cwd=tmp_path)


def test_another_end_of_text_leaves_the_tokenizers_files(place: Path) -> None:
    with ExitStack() as stack:
        model = resolve_model(place / "run", stack)
        own = model.overrides(["Data.tokenizer.eos_token=x"])
        assert "Data.tokenizer.dir" in [one.key for one in own if isinstance(one, Setting)]
        other = model.overrides(["Data.tokenizer.dir=x"])
        assert "Data.tokenizer.dir" not in [one.key for one in other if isinstance(one, Setting)]


def test_two_processes_start_from_hugging_faces_files(place: Path, tmp_path: Path) -> None:
    """The model cut in two has the loss that it has whole."""
    whole = loss_in(verb("eval", place / "run", cwd=tmp_path).splitlines()[-1])
    given = ["--from", place / "hf", "-c", place / "run.yaml", "--output", "new", "--nproc", "2"]
    cut = ["Distributed.mp_degree=2", "Engine.max_steps=1", "Engine.eval_freq=1"]
    log = verb("finetune", *given, *(word for one in cut for word in ("-o", one)), cwd=tmp_path)
    before = next(line for line in log.splitlines() if "eval at global step 0" in line)
    assert loss_in(before) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["finetune", "--from", ""], "name of the model's directory is empty"),
        (["generate"], "give CHECKPOINT"),
        (["infer"], "give EXPORT"),
        (["generate", "mute", "x"], "does not say what network it is"),
        (["eval", "."], "there is no complete checkpoint in"),
        (["infer", "run", "x"], "holds no exported model"),
        (["generate", "run", "x", "-o", "Engine.save_load.ckpt_dir=hf"], "ckpt_dir"),
        (["finetune", "--from", "run", "--output", ""], "Engine.save_load.output_dir = '' (--output)"),
        (["finetune", "--from", "run", "--output", "x", "-o", "Engine.max_stepz=1"], "stepz (-o override 1)"),
        (["finetune", "--from", "hf", "-o", "Model.num_layers=0"], "num_layers = 0 (-o override 1)"),
        (["finetune", "--from", "hf", "-o", LONG], "max_position_embeddings = 64 (the model in hf)"),
        (["finetune", "--from", "older", "-o", LONG], "max_position_embeddings = 64 (the model in older)"),
        (["finetune", "--from", "fleetx", "-o", LONG], "max_position_embeddings = 64 (the model in fleetx)"),
        (["eval", "run", "--text", "absent.txt"], "Offline_Eval.eval_path (--text)"),
        (["eval", "run", "--text", "a", "-o", "Model.module=GPTModule"], "'GPTEvalModule' (--text)"),
        (["export", "fleetx", "--output", "run.yaml"], "output_dir = 'run.yaml' (--output)"),
        (["generate", "hf", " "], "Generation.prompt.0 = ' ' (PROMPT)"),
        (["generate", "fleetx", "x", "-o", "Global.seed=x"], "Global.seed = 'x' (-o override 1)"),
        (["serve", "run", "--port", "99999"], "Serve.port = 99999 (--port)"),
    ],
)
def test_a_mistake_is_where_the_user_wrote_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    """Not at an override that the verb makes of its options, nor in a file that it has written for itself."""
    monkeypatch.chdir(place)
    with pytest.raises(UserError) as caught:
        call(words[0], words[1:])
    assert said in str(caught.value)


def test_python_names_its_arguments(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    tree = yaml.safe_load(Path("run.yaml").read_text())
    for wrong, said in (
        (lambda: GPT.from_pretrained("hf", overrides={"Global.seed": "x"}), "Global.seed = 'x' (overrides)"),
        (lambda: GPT.from_pretrained("hf", overrides=["Global.seed=x"]), "Global.seed = 'x' (-o override 1)"),
        (lambda: ppfleetx.Trainer({**tree, "Global": {"seed": "x"}}), "Global.seed = 'x' (argument config)"),
        (lambda: ppfleetx.Trainer(tree, output_dir=""), "output_dir = '' (output_dir)"),
    ):
        with pytest.raises(ConfigError) as caught:
            wrong()
        assert said in str(caught.value)


def left_in(tmp_path: Path) -> set[str]:
    """Shared directories, without the locks, which are empty files."""
    return {path.name for path in tmp_path.glob("ppfleetx-*/*") if path.is_dir()}


def test_processes_of_a_job_convert_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """All of them are told the same directory, which the last one removes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:1,127.0.0.1:2")
    with ExitStack() as second:
        with ExitStack() as first:
            found = [resolve_model(place / "hf", stack) for stack in (first, second)]
            assert found[0] == found[1] and capsys.readouterr().out.count("it is converted into") == 1
            monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:1,127.0.0.1:3")
            with ExitStack() as other_job:
                assert resolve_model(place / "hf", other_job).checkpoint != found[0].checkpoint
        assert found[1].checkpoint.is_dir()
    assert not left_in(tmp_path)


def test_a_process_that_fails_leaves_nothing_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = tmp_path / "source"
    source.mkdir()

    def fail(target: Path) -> None:
        target.mkdir()
        raise CheckpointError("it is damaged")

    with ExitStack() as stack:
        with pytest.raises(CheckpointError, match="damaged"):
            shared_directory(source, {}, fail, stack)
        assert shared_directory(source, {}, Path.mkdir, stack).is_dir()
    monkeypatch.setattr("os.getuid", lambda: 12345678)
    (tmp_path / "ppfleetx-12345678").mkdir()
    with pytest.raises(CheckpointError, match="can be changed by other users"), ExitStack() as stack:
        shared_directory(source, {}, Path.mkdir, stack)


def test_what_processes_that_were_killed_have_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("finished", "filling", "used", "next"):
        (tmp_path / name).mkdir()
    before: set[str] = set()
    for name in ("finished", "filling"):

        def fill(target: Path, name: str = name) -> None:
            target.mkdir()
            if name == "filling":
                os._exit(0)

        child = os.fork()
        if not child:
            shared_directory(tmp_path / name, {}, fill, ExitStack())
            os._exit(0)
        os.waitpid(child, 0)
        left = left_in(tmp_path)
        assert len(left) == 1 and not left & before, "the directory of this process alone"
        before = left
    with ExitStack() as stack:
        used, new = (shared_directory(tmp_path / name, {}, Path.mkdir, stack) for name in ("used", "next"))
        assert used.is_dir() and new.is_dir()
        assert not before & left_in(tmp_path)
    assert not left_in(tmp_path)


def test_what_was_made_for_a_trainer_goes_with_it(place: Path) -> None:
    """Also in a process that never says when it has done with it."""
    trainer = Trainer(task="text_generation", model=str(place / "hf"))
    made = trainer._found(place / "hf").checkpoint.parent
    assert made.is_dir()
    del trainer
    gc.collect()
    assert not made.exists()


def test_a_tokenizer_of_the_users_wins() -> None:
    place = ResolvedModel("here", None, Path("here"), Path("here"))
    assert len(place.overrides(["Data.tokenizer.vocab_file=v"])) == 2 and len(place.overrides()) == 2


def test_arguments_of_the_launcher_are_not_for_the_ranks() -> None:
    typed = "-c F --nproc 2 -o a=b --master=h:1 --log-dir d --check --nnodes=2"
    assert without_launch_options(typed.split()) == ["-c", "F", "-o", "a=b", "--check"]


def test_ranks_are_started_and_their_errors_carry_their_number(place: Path, tmp_path: Path) -> None:
    line = f"-m ppfleetx train -c {place / 'run.yaml'} --nproc 2 --log-dir logs -o Engine.max_steps=1"
    run = [sys.executable, *line.split()]
    done = programs.run(run, timeout=120, cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "first/epoch_0_step_1/COMPLETE").is_file(), done.stdout
    done = programs.run(run, timeout=120, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "[rank 0] error: Engine.save_load.output_dir" in done.stdout
