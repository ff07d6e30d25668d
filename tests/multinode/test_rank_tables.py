"""Two hosts of one merged rank table, each started with run_distribute.sh as in MindFormers' model card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, environment, losses
from tests.helpers import programs
from tests.multinode.nodes import Node, finish

PROJECT = ROOT / "projects/mindformers"
CONFIG = """
base_config: {main}
output_dir: {output}
train_dataset: {{data_loader: {{dataset_dir: {corpus}}}}}
runner_config: {{epochs: 1, batch_size: 8}}
lr_schedule: {{learning_rate: 0.01, warmup_steps: 2}}
callbacks: [{{type: MFLossMonitor}}]
parallel_config: {{data_parallel: 2, model_parallel: 2, pipeline_stage: 1, micro_batch_num: 1}}
model:
  model_config: {{embedding_size: 32, num_layers: 2, num_heads: 2, seq_length: 64, vocab_size: 512,
    hidden_dropout_prob: 0, attention_probs_dropout_prob: 0, eos_token: null, compute_dtype: float32,
    param_init_type: float32, softmax_dtype: float32}}
"""


def write(directory: Path, name: str, prefix: Path) -> Path:
    path = directory / f"{name}.yaml"
    main = PROJECT / "configs/gpt2/run_gpt2_13b.yaml"
    path.write_text(CONFIG.format(main=main, output=directory / name, corpus=prefix))
    return path


def start(node: Node, port: int, table: Path, config: Path, devices: str) -> subprocess.Popen:
    script = PROJECT / "scripts/run_distribute.sh"
    return subprocess.Popen(
        node.command("bash", str(script), str(table), str(config), devices, "train"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment(), "PYTHON": sys.executable, "MASTER_PORT": str(port)},
        cwd=table.parent,
        start_new_session=True,
    )


@pytest.mark.slow
def test_two_hosts_train_as_one_process(corpus: Path, tmp_path: Path, nodes: tuple[Node, Node]) -> None:
    tools = PROJECT / "mindformers/tools"
    for node in nodes:
        make = [sys.executable, tools / "hccl_tools.py", "--device_num", "[0,2)", "--server_ip", node.address]
        assert programs.run(list(map(str, make)), cwd=tmp_path, timeout=60).returncode == 0
    parts = [f"hccl_2p_01_{node.address}.json" for node in nodes]
    merge = [sys.executable, str(tools / "merge_hccl.py"), *parts]
    assert programs.run(merge, cwd=tmp_path, timeout=60).returncode == 0
    table = tmp_path / "hccl_2s_4p.json"
    assert json.loads(table.read_text())["server_list"][1]["device"][1]["rank_id"] == "3"

    config = write(tmp_path, "two", corpus)
    jobs = [
        start(node, 38527, table, config, ranks)
        for node, ranks in zip(nodes, ("[0,2]", "[2,4]"), strict=True)
    ]
    results = finish(jobs, 120)
    assert [code for code, _ in results] == [0, 0], results
    alone = ["--config", str(write(tmp_path, "one", corpus)), "--use_parallel=False", "--batch_size=16"]
    done = programs.run(
        [sys.executable, str(PROJECT / "run_mindformer.py"), *alone], timeout=120, env=environment()
    )
    assert done.returncode == 0, done.stderr
    got, expected = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert len(got) == len(expected) > 3
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
