#!/usr/bin/env bash
# One card. Further overrides may follow: ./projects/gpt/pretrain_gpt_345M_single_card.sh -o Engine.max_steps=100
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python tools/train.py -c ppfleetx/configs/nlp/gpt/pretrain_gpt_345M_single_card.yaml "$@"
