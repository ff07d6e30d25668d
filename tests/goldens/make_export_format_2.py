"""An exported model of format 2, for tests that such exports still run.

    python tests/goldens/make_export_format_2.py

writes export_format_2.tar.gz beside this file: a tiny model of random weights as commit 9304a9a exported it
with Paddle 3.3.1, and `expected.json`, the tokens that it gave then. Later commits export another format, so
the recipe is run from a checkout of that one.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

PROMPTS = ["the cat", "and", "the other hat and the ca"]
SETTINGS = {
    "greedy": {"decode_strategy": "greedy_search"},
    "plain": {"temperature": 1.5},
    "top": {"top_k": 7, "top_p": 0.9, "temperature": 2.0, "min_dec_len": 5},
}


def main() -> None:
    from ppfleetx.utils.process_env import import_paddle, prepare_process

    prepare_process()
    import_paddle()
    from ppfleetx.config.sections.root import GenerationConfig
    from tests.deploy.exports import GPT2_STYLE, make_export

    sizes = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "ffn_hidden_size": 32,
    }
    with tempfile.TemporaryDirectory() as directory:
        exported = make_export(Path(directory), {**GPT2_STYLE, **sizes}, "Inference.panels=False")
        ids = {}
        for name, keys in SETTINGS.items():
            cfg = GenerationConfig(max_dec_len=12, seed=7, **keys)
            ids[name] = [list(one.ids) for [one] in exported.engine.generate(PROMPTS, cfg)]
        expected = Path(directory) / "expected.json"
        expected.write_text(json.dumps({"prompts": PROMPTS, "settings": SETTINGS, "ids": ids}))
        with tarfile.open(HERE / "export_format_2.tar.gz", "w:gz") as archive:
            archive.add(exported.directory, "rank_0")
            archive.add(expected, expected.name)


if __name__ == "__main__":
    main()
