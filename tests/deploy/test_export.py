"""``tools/export.py`` and ``tools/inference.py``: the documented commands, and what they refuse."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppfleetx.checkpoint.resolve_checkpoint import resolve_checkpoint
from ppfleetx.commands import infer
from ppfleetx.commands.deploy_verbs import Export
from ppfleetx.commands.infer import merge_settings
from ppfleetx.commands.model_verbs import Infer
from ppfleetx.commands.resolve_model import as_replicas
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import GenerationConfig
from ppfleetx.deploy import export_dir
from ppfleetx.deploy.export import check_target
from ppfleetx.deploy.export_dir import check_inference, check_onednn, has_bfloat16
from ppfleetx.deploy.static.program import quick_conversion
from tests.deploy.exports import GPT2_STYLE, Exported, configuration, write_run
from tests.helpers import programs

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "ppfleetx" / "configs" / "nlp" / "gpt"
SHRUNK = [f"Model.{key}={value}" for key, value in GPT2_STYLE.items()]
SHORT_DATA = ["Data.Train.dataset.max_seq_len=64", "Data.Eval.dataset.max_seq_len=64"]
LAUNCH = ("-m", "paddle.distributed.launch", "--devices", "0")
ONE_DEVICE = {"CUDA_VISIBLE_DEVICES": "0"}  # Paddle's launcher asks for it by that name, GPU or not


def command(
    directory: Path,
    tool: str,
    config: str,
    *overrides: str,
    launcher: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    executed: bool = False,
) -> subprocess.CompletedProcess:
    words = [word for override in overrides for word in ("-o", override)]
    program = [sys.executable, *launcher, str(ROOT / tool), "-c", str(CONFIGS / config), *words, *options]
    start = subprocess.Popen if executed else programs.Popen
    process = start(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(ONE_DEVICE if launcher == LAUNCH else {})},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a launcher that was killed leaves its ranks
    return subprocess.CompletedProcess(program, process.returncode, output, errors)


def texts(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return "Prompt:" + done.stdout.partition("Prompt:")[2].partition("\n\nLAUNCH")[0].rstrip()


def test_the_documented_commands(tmp_path: Path, exported: Exported) -> None:
    """From the pretraining YAML with the launcher, into the output directory of training itself."""
    run = write_run(tmp_path / "output", GPT2_STYLE)
    rank_dir = "Engine.save_load.ckpt_dir=./output/epoch_0_step_4/mp_00_sharding_00_pp_00"
    pretrain = "pretrain_gpt_345M_single_card.yaml"
    overrides = [rank_dir, *SHRUNK, *SHORT_DATA]
    done = command(tmp_path, "tools/export.py", pretrain, *overrides, launcher=LAUNCH, executed=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOTE: Engine.mix_precision is disabled" in done.stdout
    assert "[    INFO] - export inference model saved in ./output/rank_0/model" in done.stdout
    assert resolve_checkpoint(run).name == "epoch_0_step_4"
    for path in run.glob("epoch_*/**/*"):
        path.unlink() if path.is_file() else None  # from here on, nothing is left of the checkpoint
    options = ["Generation.decode_strategy=greedy_search", "Generation.max_dec_len=9"]
    prompts = 'Generation.prompt=["the cat", "and"]'
    inference = "inference_gpt_345M_single_card.yaml"
    overrides = [rank_dir, *options, prompts]
    answered = command(tmp_path, "tools/inference.py", inference, *overrides, launcher=LAUNCH, executed=True)
    cfg = configuration(exported.run, GPT2_STYLE, *options).Generation
    expected = ""
    for prompt, [one] in zip(
        ["the cat", "and"], exported.generator.generate(["the cat", "and"], cfg), strict=True
    ):
        expected += f"Prompt: {prompt}\nGeneration: {prompt}{one.text}\n\n"
    assert texts(answered) == expected.rstrip()


@pytest.mark.slow
def test_from_the_generation_yaml(tmp_path: Path, exported: Exported) -> None:
    """Its settings go with the export, and are used where the configuration has none of its own; replicas
    share the prompts and give what one process gives."""
    overrides = [
        f"Engine.save_load.ckpt_dir={exported.run}",
        f"Engine.save_load.output_dir={tmp_path / 'out'}",
        f"Data.tokenizer.dir={exported.run / 'tokenizer'}",
        "Generation.max_dec_len=7",
        "Generation.repetition_penalty=1.5",
    ]
    done = command(tmp_path, "tools/export.py", "generation_gpt_345M_dp8.yaml", *SHRUNK, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = json.loads((tmp_path / "out" / "rank_0" / "export.json").read_text())
    assert manifest["generation"]["repetition_penalty"] == 1.5
    prompts = ["the", "and the other", "hat"]
    written = [f"Generation.prompt={json.dumps(prompts)}", "Generation.max_dec_len=7"]
    answered = command(
        tmp_path,
        "tools/inference.py",
        "inference_gpt_345M_dp8.yaml",
        f"Inference.model_dir={tmp_path / 'out' / 'rank_0'}",
        "Distributed.mp_degree=2",
        *written,
        launcher=("-m", "paddle.distributed.launch", "--nproc_per_node", "2"),
        options=("--output", "answers.jsonl"),
    )
    path = CONFIGS / "generation_gpt_345M_single_card.yaml"
    cfg = load_config(path, [*written, "Generation.repetition_penalty=1.5"])
    expected = exported.generator.generate(prompts, cfg.Generation, seed=cfg.Global.seed)
    lines = [
        f"Prompt: {prompt}\nGeneration: {prompt}{one.text}\n\n"
        for prompt, [one] in zip(prompts, expected, strict=True)
    ]
    assert texts(answered) == "".join(lines).rstrip()
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [tuple(answer["generations"][0]["ids"]) for answer in answers] == [one.ids for [one] in expected]
    assert "has its own Model.vocab_size, Model.hidden_size" in answered.stdout
    assert "NOTE: the plan of the configuration (dp 1, mp 2, pp 1, sharding 1) is not used" in answered.stdout


def test_a_users_mistake_is_one_quick_message(tmp_path: Path) -> None:
    done = command(tmp_path, "tools/inference.py", "inference_gpt_345M_single_card.yaml")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "Inference.model_dir" in done.stderr
    assert "CPU settings" not in done.stdout, "Paddle was loaded for nothing"


@pytest.fixture
def small(exported: Exported) -> list[str]:
    """A pretraining configuration and the checkpoint it is of."""
    configuration(exported.run, GPT2_STYLE)
    return [str(exported.run.parent / "pretrain.yaml"), f"Engine.save_load.ckpt_dir={exported.run}"]


def run_export(path: str | Path, overrides: Sequence[str]) -> None:
    Export(config=str(path), override=tuple(overrides)).run()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["Generation.decode_strategy=beam_search"], r"decode_strategy = 'beam_search' .*ppfleetx generate"),
        (["Generation.use_cache=False"], "always keeps keys and values"),
        (["Model.module=GPTFinetuneModule", "Model.num_classes=2"], "only models that continue text"),
    ],
)
def test_what_cannot_be_exported(small: list[str], overrides: list[str], words: str) -> None:
    path, checkpoint = small
    with pytest.raises(ConfigError, match=words):
        run_export(path, [checkpoint, *overrides])


def test_a_checkpoint_that_is_not_there_cannot_be_exported(small: list[str], tmp_path: Path) -> None:
    missing, output = tmp_path / "no/such/place", tmp_path / "out"
    overrides = [f"Engine.save_load.ckpt_dir={missing}", f"Engine.save_load.output_dir={output}"]
    with pytest.raises(CheckpointError, match=f"there is no directory {missing}"):
        run_export(small[0], overrides)
    assert not output.exists(), "nothing is made before"


def test_an_export_is_made_by_one_process(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(ConfigError, match=r"2 processes .* leaves out communication.* merged into one"):
        run_export(small[0], small[1:])


def test_what_is_in_the_way_stays(small: list[str], tmp_path: Path) -> None:
    path, checkpoint = small
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "precious").touch()
    with pytest.raises(ConfigError, match=r"rank_0 exists and is not an export"):
        run_export(path, [checkpoint, f"Engine.save_load.output_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"precious is a file; name a directory"):
        run_export(path, [checkpoint, f"Engine.save_load.output_dir={tmp_path / 'rank_0' / 'precious'}"])
    with pytest.raises(ConfigError, match=r"precious is a file; name a directory"):
        run_export(path, [checkpoint, f"Engine.save_load.output_dir={tmp_path / 'rank_0/precious/a/b'}"])
    assert (tmp_path / "rank_0" / "precious").exists()


def test_output_names_no_run(small: list[str], exported: Exported) -> None:
    path, checkpoint = small
    with pytest.raises(ConfigError, match=r"--output = .* holds a run or a model \(checkpoint epoch_"):
        Export(config=path, override=(checkpoint,), output=str(exported.run)).run()


def test_an_export_that_holds_other_files_is_not_replaced(
    small: list[str], exported: Exported, tmp_path: Path
) -> None:
    copy = shutil.copytree(exported.directory, tmp_path / "rank_0")
    path, checkpoint = small
    cfg = load_config(path, [checkpoint, f"Engine.save_load.output_dir={tmp_path}"])
    check_target(cfg)
    (copy / "tokenizer" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"contains 'tokenizer/notes\.txt'"):
        check_target(cfg)


def test_a_place_that_cannot_be_written_is_reported_at_once(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    path, checkpoint = small
    with pytest.raises(ConfigError, match=rf"nothing may be created in {tmp_path}"):
        run_export(path, [checkpoint, f"Engine.save_load.output_dir={tmp_path / 'a/b'}"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("Inference.mp_degree=2", r"mp_degree = 2 \(-o .* holds the whole model"),
        ("Inference.TensorRT.precision=fp16", "TensorRT needs a GPU"),
        ("Inference.TensorRT.collect_shape=True", "name the file"),
        ("Inference.precision=bf16", "set onednn to True"),
        ("Inference.cpu_threads=100000", "an integer from 1 to 1024"),
        ("Inference.model_dir=/no/such/place", "there is no such directory"),
        ("Generation.decode_strategy=beam_search", "greedy_search or sampling"),
        ("Generation.prompt_file=/no/such/file", "cannot be read"),
    ],
)
def test_what_cannot_be_answered(exported: Exported, override: str, words: str) -> None:
    given = [] if "model_dir" in override else [f"Inference.model_dir={exported.directory}"]
    with pytest.raises(ConfigError, match=words):
        config = CONFIGS / "inference_gpt_345M_single_card.yaml"
        Infer(config=str(config), override=(*given, override)).run()


def test_options_of_another_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def inference(*overrides: str) -> None:
        path = CONFIGS / "inference_gpt_345M_single_card.yaml"
        check_inference(load_config(path, [f"Inference.{override}" for override in overrides]), device)

    device = "gpu"
    inference("TensorRT.precision=fp32")
    for override in ("onednn=True", "cpu_threads=2"):
        with pytest.raises(ConfigError, match="is for the CPU"):
            inference(override)
    device = "cpu"
    monkeypatch.setattr(export_dir, "has_bfloat16", lambda: False)
    with pytest.raises(ConfigError, match=r"precision = 'bf16'.*none of amx_bf16, avx512_bf16; use fp32"):
        inference("precision=bf16", "onednn=True")
    for flags, expected in (("fpu avx512f", False), ("fpu avx512_bf16", True), ("amx_bf16 sse", True)):
        (tmp_path / "cpuinfo").write_text(f"vendor_id : x\nflags\t\t: {flags}\nbugs : avx512_bf16\n")
        assert has_bfloat16(tmp_path / "cpuinfo") is expected
    assert not has_bfloat16(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("keys", "possible"),
    [
        ({"decode_strategy": "greedy_search"}, True),
        ({"top_k": 5, "top_p": 0.9}, True),
        ({"top_k": 299}, True),
        ({"top_k": 300}, False),
        ({"top_p": 0.7}, False),
    ],
)
def test_what_onednn_can_draw(keys: dict[str, object], possible: bool) -> None:
    words = r"top_k = \d+.*from the 1 to 299 likeliest.*onednn=False"
    with contextlib.nullcontext() if possible else pytest.raises(ConfigError, match=words):
        check_onednn(GenerationConfig(**keys), 300)


def test_a_parallel_configuration_is_run_by_one_process() -> None:
    path = CONFIGS / "pretrain_gpt_175B_mp8_pp16.yaml"
    split = as_replicas(load_config(path), 128)[1]
    # Though there are as many processes:
    assert "mp 8, pp 16, sharding 1, sequence parallel) is not used" in split[0]
    cfg, notes = as_replicas(load_config(path), 1)
    assert cfg.plan.world_size == 1
    assert not cfg.Engine.mix_precision.enable
    assert ["mp 8, pp 16" in notes[0], "mix_precision" in notes[1]] == [True, True]
    assert cfg.origins  # messages still name places


def test_settings_of_the_export_and_the_configuration() -> None:
    def merged(exported: dict[str, object], *overrides: str) -> dict[str, object]:
        cfg = load_config(CONFIGS / "pretrain_gpt_345M_single_card.yaml", overrides)
        return merge_settings(exported, cfg).model_dump(exclude_unset=True)

    assert merged({"top_k": 3, "max_dec_len": 5}, "Generation.top_k=4") == {"top_k": 4, "max_dec_len": 5}
    with pytest.raises(ConfigError, match=r"Generation: does not fit .*: min_dec_len = 6: .*cannot both"):
        merged({"max_dec_len": 5}, "Generation.min_dec_len=6")


def test_paddles_conversion_is_left_as_it_was() -> None:
    from paddle.jit.dy2static import convert_call_func, program_translator

    cache = program_translator._FUNCTION_CACHE
    before = (convert_call_func.is_unsupported, cache.convert_with_cache)
    with quick_conversion():
        assert convert_call_func.is_unsupported is not before[0]
        assert convert_call_func.is_unsupported(len)
        assert not convert_call_func.is_unsupported(texts)
    assert (convert_call_func.is_unsupported, cache.convert_with_cache) == before


def test_an_export_of_a_plugins_network_needs_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has the plugin's layers; only the sizes of the model are read again."""
    model = {
        "name": "Mine",
        "normalization": "MyNorm",
        "hidden_act": "relu",
        "vocab_size": 512,
        "hidden_size": 64,
    }
    manifest = SimpleNamespace(model=model)
    monkeypatch.setattr(infer, "_open", lambda export, place: (Path(export), manifest))
    read = load_config(
        infer._config_of("exported"), ["Model.num_layers=2", "Model.num_attention_heads=4"]
    ).Model
    assert (read.name, read.hidden_act, read.hidden_size) == ("GPT", "relu", 64)
