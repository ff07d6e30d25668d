#!/usr/bin/env bash
# Perplexity of WikiText-103 with a checkpoint of any plan (docs/evaluation.md), and with -o Offline_Eval.cloze_eval=True
# the accuracy on LAMBADA:
#   ./projects/gpt/evaluate_gpt_345M_single_card.sh -o Engine.save_load.ckpt_dir=output
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python tools/eval.py -c ppfleetx/configs/nlp/gpt/eval_gpt_345M_single_card.yaml "$@"
