"""Writes ppfleetx/doctor/losses.json: the losses that `ppfleetx doctor` compares a machine with.

    python tests/goldens/make_doctor_losses.py

Computed in float64 on a CPU, so that the order of sums, and with it machine and threads, does not matter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import paddle

from ppfleetx.doctor.golden_losses import GOLDEN, LENGTH, MODELS, SEQUENCES, STEPS, train

if __name__ == "__main__":
    paddle.set_default_dtype("float64")
    recipe = (
        f"tests/goldens/make_doctor_losses.py: {STEPS} steps of {SEQUENCES} sequences of {LENGTH} tokens, "
        "AdamW, float64"
    )
    losses = {model: [round(loss, 12) for loss in train(model, "cpu")] for model in MODELS}
    GOLDEN.write_text(json.dumps({"recipe": recipe, "losses": losses}, indent=1) + "\n", "utf-8")
    print(GOLDEN.read_text("utf-8"))
