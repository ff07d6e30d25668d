#!/usr/bin/env bash
# One card, prompts with responses, adapters. Further overrides may follow:
# ./projects/gpt/finetune_gpt_345M_single_card_sft.sh -o Model.lora.base=./pretrained
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python tools/train.py -c ppfleetx/configs/nlp/gpt/finetune_gpt_345M_single_card_sft.yaml "$@"
