#!/usr/bin/env bash
# Make ./data/my-gpt_text_sentence.{bin,idx} of text that is here already: one JSON object {"text": ...} a line.
#   bash ./test/dataset_preprocess_gpt.sh --input=wiki_all.json [--output_dir=./data] [--workers=8]
# The vocabulary is ./data/gpt2-vocab.json with ./data/gpt2-merges.txt. Nothing is downloaded. WikiExtractor's
# --json output of a dump of Wikipedia, in one file, is such a text.
set -euo pipefail
exec python3 "$(dirname "$0")/preprocess.py" "$@"
