#!/usr/bin/env bash
# Export a checkpoint; it must be named: ./projects/gpt/export_gpt_345M_single_card.sh -o Engine.save_load.ckpt_dir=output
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python tools/export.py -c ppfleetx/configs/nlp/gpt/generation_gpt_345M_single_card.yaml "$@"
