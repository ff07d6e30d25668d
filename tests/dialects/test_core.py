"""The common part of the translators, with a small dialect of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config, load_tree
from ppfleetx.config.reading.parse import parse_yaml
from ppfleetx.dialects.key_tables import KeyTable, tables_of
from ppfleetx.dialects.translation import Translation, translate
from ppfleetx.dialects.user_options import given_arguments, given_in, normal_name
from tools.gen_dialect_docs import key_table

TABLE = KeyTable(
    tables_of(
        yaml.safe_load("""
all:
- {key: model.width twin.width, to: Model.hidden_size}
- {key: model.depth, to: Model.num_layers}
- {key: model.heads, to: Model.num_attention_heads}
- {key: model.words, to: Model.vocab_size}
- {key: model.act, to: Model.hidden_act, choices: {tanh: gelu, relu: relu}}
- {key: model.tied, to: Model.tie_word_embeddings, by: flag}
- {key: model.out, to: Engine.save_load.output_dir}
- {key: model.betas, to: Optimizer.beta1 Optimizer.beta2, by: betas}
- {key: run.batch, joint: Global.local_batch_size, says: times run.parts}
- {key: run.parts, joint: Global.local_batch_size, says: see run.batch}
- {key: run.graph, fixed: there is one mode, only: [false]}
- {key: run.any, fixed: it changes | nothing}
- {key: device.*, unused: another compiler}
- {key: steps.*.type, unused: items of a list}
- {key: moe.**, refused: mixtures of experts are not built}
""")
    )["all"]
)


def batch(run: Translation) -> None:
    size = run.integer("run.batch", 1, least=1) * run.integer("run.parts", 1, least=1)
    run.put("Global.local_batch_size", size, "run.batch", "run.parts", why="batch x parts")


WHOLE = """
model:
  width: 64
  depth: 2
  heads: 4
  words: 100
  act: tanh
  tied: off
  out: 007
run: {batch: 2, parts: 3, graph: false, any: x}
device: {a: 1, b: 2}
steps: [{type: x}, {type: y}]
moe:
"""


def test_a_whole_file_becomes_a_configuration_that_knows_their_lines(tmp_path: Path) -> None:
    tree = parse_yaml(WHOLE, "theirs.yaml", with_lines=True)
    result = translate("Theirs", "theirs.yaml", given_in(tree), TABLE, [batch])
    cfg = load_tree(result.tree(), result.warnings)
    assert (cfg.Model.hidden_size, cfg.Model.hidden_act, cfg.Model.tie_word_embeddings) == (64, "gelu", False)
    assert cfg.Engine.save_load.output_dir == "007"
    assert cfg.batch.local_batch_size == 6
    assert cfg.origins["Model.hidden_size"] == "theirs.yaml:3, model.width"
    assert cfg.origins["Global.local_batch_size"] == "theirs.yaml:10, run.batch; theirs.yaml:10, run.parts"
    assert [one for one in cfg.warnings if "device.a, device.b, steps.0.type, steps.1.type" in one]

    (tmp_path / "ours.yaml").write_text(result.yaml())
    assert load_config(tmp_path / "ours.yaml") == cfg
    assert "hidden_size: 64  # theirs.yaml:3, model.width" in result.yaml()
    assert "# Without effect, because always so here: run.graph, run.any" in result.yaml()


def test_arguments() -> None:
    argv = ["--Num-Layers", "24", "--lr=1e-4", "--fp16", "--data-path", "0.5", "a", "--min", "-1"]
    found = list(given_arguments(argv, {"fp16"}, {"data_path"}))
    assert [(normal_name(one.key), one.value) for one in found] == [
        ("num_layers", 24),
        ("lr", 1e-4),
        ("fp16", True),
        ("data_path", [0.5, "a"]),
        ("min", -1),
    ]
    assert found[1].origin == "argument 3, --lr"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["24"], "24 (argument 1): is not an option"),
        (["--fp16", "--lr"], "--lr (argument 2): needs a value"),
        (["--lr", "1", "--lr", "2"], "--lr = 2 (argument 3): is already given (argument 1)"),
    ],
)
def test_arguments_that_cannot_be_read(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        list(given_arguments(argv, {"fp16"}))
    assert words in str(error.value)


def test_the_table_for_the_documentation() -> None:
    rows = key_table(TABLE.keys).splitlines()
    assert "| `model.width`, `twin.width` | `Model.hidden_size` |  |" in rows
    assert "| `run.graph` | fixed: False | there is one mode |" in rows
    assert "| `run.any` | fixed | it changes \\| nothing |" in rows
    assert "| `moe.**` | refused | mixtures of experts are not built |" in rows
