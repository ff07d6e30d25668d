"""A script that computes the logits of a Hugging Face directory with transformers.

    python transformers_logits.py DIRECTORY PROBE.npz LOGITS.npy

It does not import ppfleetx, so any interpreter that has transformers can run it.
"""

from __future__ import annotations

import sys


def main(directory: str, probe: str, answer: str) -> None:
    """Run the model in ``directory`` on the arrays ``tokens`` and ``positions`` of the file ``probe``, and
    write its logits, float32 ``[b, s, vocabulary]``, to the file ``answer``."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    config._experts_implementation = "eager"  # the grouped GEMM does not support every size
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,  # pickles are refused
        torch_dtype=torch.float32,
        attn_implementation="eager",
    )
    model.eval()
    with np.load(probe) as given:
        tokens, positions = (torch.from_numpy(given[name]) for name in ("tokens", "positions"))
    with torch.no_grad():
        # Without a mask, gaps between positions would count as the ends of packed sequences.
        output = model(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens))
    np.save(answer, output.logits.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
