#!/usr/bin/env bash
# Continue prompts with an export: ./projects/gpt/inference_gpt_345M_single_card.sh -o 'Generation.prompt=Once upon a time'
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python tools/inference.py -c ppfleetx/configs/nlp/gpt/inference_gpt_345M_single_card.yaml "$@"
