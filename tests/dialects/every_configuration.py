"""Configurations of the other toolkits train to the same bits as what ``ppfleetx translate`` makes of them.

    python -m tests.dialects.every_configuration [NAME ...]

Each is run twice on CPU ranks, by the program of its dialect and natively from the translated file. Losses
of all steps and all weights must be the same bits. Some eight minutes; a part of ``make parity``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from tests.e2e.conftest import ROOT, environment, losses
from tests.e2e.test_mindformers import same_weights
from tests.helpers.ranks import free_port

PROJECTS = ROOT / "projects"
VOCAB = 300


@dataclass(frozen=True)
class Configuration:
    """A command line of another toolkit, without its program.

    Attributes:
        program: of ``projects/``.
        arguments: what stands behind it.
        ranks: processes.
    """

    program: str
    arguments: tuple[str, ...]
    ranks: int = 1


def _mindformers(*options: str, ranks: int = 1, config: str = "run_gpt2.yaml") -> Configuration:
    model = (
        "embedding_size=32 num_layers=4 num_heads=4 seq_length=16 hidden_act=fast_gelu eos_token=null "
        f"vocab_size={VOCAB}"
    )
    words = [f"model.model_config.{word}" for word in model.split()]
    given = ["--config", str(PROJECTS / "mindformers/configs/gpt2" / config), "--run_mode", "train"]
    given += ["--dataset_dir", "data", "--epochs", "1", "--options", *words, "output_dir=output"]
    given += ["lr_schedule.learning_rate=0.01", "callbacks.1.save_checkpoint_steps=4", *options]
    return Configuration("mindformers/run_mindformer.py", tuple(given), ranks)


def _megatron(words: str, ranks: int = 1) -> Configuration:
    common = (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
        "--max-position-embeddings 16 "
        "--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 --min-lr 1e-3 --lr-decay-style "
        "cosine --lr-warmup-iters 2 --clip-grad 1.0 --weight-decay 0.1 --data-path data/text --split 100,0,0 "
        "--tokenizer-type NullTokenizer --vocab-size 299 --log-interval 1 --eval-interval 1000 "
        "--eval-iters 0 --save output --save-interval 6 --attention-dropout 0 --hidden-dropout 0 "
    )
    return Configuration("megatron/pretrain_gpt.py", tuple((common + words).split()), ranks)


def _mindspeed(name: str, ranks: int = 1) -> Configuration:
    return Configuration("mindspeed/pretrain_gpt.py", ("--yaml-cfg", name), ranks)


def _paddleformers(words: str = "", ranks: int = 1) -> Configuration:
    return Configuration("paddleformers/run_pretrain.py", ("paddleformers.yaml", *words.split()), ranks)


CONFIGURATIONS = {
    "mindformers": _mindformers("runner_config.batch_size=2"),
    "mindformers, replicas": _mindformers("runner_config.batch_size=2", "use_parallel=True", ranks=2),
    "mindformers, 13B in small": _mindformers(
        "runner_config.batch_size=1",
        "parallel_config.data_parallel=2",
        "parallel_config.pipeline_stage=2",
        "parallel_config.micro_batch_num=2",
        "lr_schedule.warmup_steps=2",
        config="run_gpt2_13b.yaml",
        ranks=8,
    ),
    "megatron": _megatron(""),
    "megatron, tensor and pipeline": _megatron(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel", ranks=4
    ),
    "megatron, divided optimizer": _megatron("--use-distributed-optimizer --recompute-activations", ranks=2),
    "megatron, llama": _megatron(
        "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
    ),
    "mindspeed": _mindspeed("mindspeed.yaml"),
    "mindspeed, virtual stages": _mindspeed("mindspeed_stages.yaml", ranks=4),
    "paddleformers": _paddleformers(),
    "paddleformers, tensor and sharding": _paddleformers(
        "--tensor_model_parallel_size 2 --sharding stage1 --sharding_parallel_size 2", ranks=4
    ),
    "paddleformers, pipeline": _paddleformers(
        "--pipeline_model_parallel_size 2 --gradient_accumulation_steps 4", ranks=2
    ),
}


def main() -> None:
    asked = sys.argv[1:] or list(CONFIGURATIONS)
    failed = []
    for name in asked:
        with tempfile.TemporaryDirectory() as directory:
            said = _differences(CONFIGURATIONS[name], Path(directory))
        print(f"{name}: {said or 'the same bits'}", flush=True)
        failed += [name] if said else []
    if failed:
        sys.exit(f"{len(failed)} of {len(asked)} differ")
    print(f"{len(asked)} of {len(asked)} train to the same bits as natively")


def _differences(configuration: Configuration, directory: Path) -> str:
    """In words how the two runs differ; empty if they do not."""
    _write_files(directory)
    program = PROJECTS / configuration.program
    _launch(directory, configuration.ranks, str(program), *configuration.arguments)
    theirs, ours = directory / "output", directory / "native"
    _translate(directory, configuration)
    shutil.move(theirs, directory / "theirs")
    _launch(
        directory,
        configuration.ranks,
        str(ROOT / "tools/train.py"),
        *("-c", "ours.yaml", "-o", "Engine.save_load.output_dir=native"),
    )
    one, other = losses(directory / "theirs"), losses(ours)
    if not one or one != other:
        return f"losses {one} and natively {other}"
    return "" if same_weights(directory / "theirs", ours) else "the weights differ"


def _translate(directory: Path, configuration: Configuration) -> None:
    before = ["torchrun", "--nproc_per_node", str(configuration.ranks)]
    words = [*before, str(PROJECTS / configuration.program), *configuration.arguments]
    _run(directory, sys.executable, str(ROOT / "tools/translate.py"), "--to", "ours.yaml", "--", *words)


def _launch(directory: Path, ranks: int, program: str, *words: str) -> None:
    launcher = ["-m", "paddle.distributed.launch", "--log_dir", "log", "--nproc_per_node", str(ranks)]
    launcher += ["--master", f"127.0.0.1:{free_port()}"]
    _run(directory, sys.executable, *(launcher if ranks > 1 else []), program, *words)


def _run(directory: Path, *command: str) -> None:
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, env=environment(), timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")


MINDSPEED = """
model_config: {{vocab_size: 300, hidden_size: 32, seq_length: 16, num_layers: 4,
  position_embedding_type: rope,
  normalization: FusedRMSNorm, num_attention_heads: 4, group_query_attention: True, num_query_groups: 2,
  attention_dropout_rate: 0.0, hidden_dropout_rate: 0.0, ffn_hidden_size: 48, hidden_act: swiglu,
  qkv_has_bias: False, out_proj_has_bias: False, mlp_has_bias: False,
  untie_embeddings_and_output_weights: True, compute_dtype: float32}}
training_config: {{training_iters: 6, output_dir: output, load_checkpoint: ""}}
dataset_config: {{dataset_dir: data/text, batch_size: 2, micro_batch_num: {micro_batches}, split: "1,0,0"}}
optimizer_config: {{optimizer_type: adam, learning_rate: 1.0e-2, lr_decay_style: cosine}}
parallel_config: {parallel}
"""
STAGES = (
    "{tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, "
    "num_layers_per_virtual_pipeline_stage: 1, sequence_parallel: True}"
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
PADDLEFORMERS = """
model_name_or_path: model
input_dir: ./data
output_dir: output
max_steps: 6
per_device_train_batch_size: 2
max_seq_length: 16
learning_rate: 1.0e-2
split: "100,0,0"
logging_steps: 1
save_steps: 6
"""


def _write_files(directory: Path) -> None:
    """A corpus, and the configurations of those who read files."""
    (directory / "data").mkdir()
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(directory / "data/text", np.uint16) as writer:
        for _ in range(24):
            document = np.append(rng.integers(0, VOCAB - 1, 40), VOCAB - 1)
            writer.add_document(document, [document.size])
    files = {
        "mindspeed.yaml": MINDSPEED.format(micro_batches=2, parallel="{}"),
        "mindspeed_stages.yaml": MINDSPEED.format(micro_batches=4, parallel=STAGES),
        "paddleformers.yaml": PADDLEFORMERS,
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    (directory / "model").mkdir()
    (directory / "model/config.json").write_text(json.dumps(LLAMA))


if __name__ == "__main__":
    main()
