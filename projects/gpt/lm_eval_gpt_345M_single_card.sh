#!/usr/bin/env bash
# Tasks of lm-evaluation-harness (pip install 'ppfleetx[lm_eval]'); it downloads their data sets when first asked:
#   ./projects/gpt/lm_eval_gpt_345M_single_card.sh -o Engine.save_load.ckpt_dir=output --tasks lambada_openai,wikitext
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python tasks/gpt/lm_eval_harness.py -c ppfleetx/configs/nlp/gpt/generation_gpt_345M_single_card.yaml "$@"
