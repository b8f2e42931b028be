# The whole life of a checkout. `make test` or `make demo` alone, with only git, make and Python there, do all set-up.
#
# PYTHON      makes the environment
# CUDA_VENV   has torch's CUDA build and the stand-in card of tests/card; `make test-cuda` makes it, 5 GB
# OLDEST_VENV has the oldest Python, torch and other libraries that pyproject.toml names; `make test-oldest` makes it, 7 GB
# PYTHONS     releases of Python that `make test-pythons` runs the tests with, each in a .venv-3.N of up to 7 GB
# PYTHON_ENV  runs everything in it; name another interpreter to use what that one has and install nothing, as on a
#             GPU machine that comes with torch: make test-gpu PYTHON_ENV=python3
# SEED        of the tests' order and of the examples they draw, to repeat a run: make test SEED=1234
# PROOF       runs tests whole, as `make proof` does: every case, operation and rank, those marked slow, ten times as many
#             examples. Without it they are the sample that CI runs: make test-cuda PROOF=1
#
# Programs are run as modules of the environment's Python: a script that pip makes begins with the path of that Python,
# and in a folder with a space in its name no such script starts.

PYTHON ?= python3
VENV := .venv
PYTHON_ENV ?= $(VENV)/bin/python
INSTALLED := $(if $(filter $(VENV)/bin/python,$(PYTHON_ENV)),$(VENV)/.installed)
BENCH_INSTALLED := $(if $(INSTALLED),$(VENV)/.installed-bench)
CUDA_VENV ?= .venv-cuda
OLDEST_VENV ?= .venv-oldest
PYTHONS ?= 3.10 3.12 3.13
DOCS_INSTALLED := $(if $(INSTALLED),$(VENV)/.installed-docs)
RAY_INSTALLED := $(if $(INSTALLED),$(VENV)/.installed-ray)
SERVE_INSTALLED := $(if $(INSTALLED),$(VENV)/.installed-serve)
INTEGRATIONS_INSTALLED := $(if $(INSTALLED),$(VENV)/.installed-integrations)

# OpenMP threads that spin while they wait take the cores from those that work, wherever something else runs beside.
export OMP_WAIT_POLICY ?= passive

# Python keeps what it has compiled, whatever the shell says: tests start hundreds of processes, and to import torch takes
# each of them 3 s less.
unexport PYTHONDONTWRITEBYTECODE

# pip compiles no modules ahead, most of which are never imported. Of an option that begins with "no" a variable says no.
export PIP_NO_COMPILE := no

.DEFAULT_GOAL := help
.PHONY: help install demo serve bench accuracy docs test quick test-engines test-integrations test-service test-gpu test-cuda test-oldest test-pythons proof bugs lint check clean

help: ## say what can be made
	@awk -F ': .*## ' '/^[a-z-]+: .*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## make .venv with the tested versions of everything; a second time does nothing

# torch by itself first: it is most of the download, and what fails after it then keeps it.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || "$(PYTHON)" -m venv $(VENV)
	$(VENV)/bin/python -m pip install --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable ".[dev,examples,watch,serve]"
	touch $@

# By itself: nothing but the benchmarks needs those that they compare with.
$(VENV)/.installed-bench: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable ".[bench]"
	$(VENV)/bin/python -m pip install --constraint constraints.txt --no-deps timm open_clip_torch ftfy wcwidth # without torchvision, which they do not need here
	touch $@

# By itself, for the same reason.
$(VENV)/.installed-docs: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable ".[docs]"
	touch $@

# By itself: Ray and what it brings along are 0.5 GB, which nothing else needs.
$(VENV)/.installed-ray: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable ".[ray]"
	touch $@

# By itself: a browser's driver, and requests that nobody thought of.
$(VENV)/.installed-serve: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable ".[serve,serve-tests]"
	touch $@

# By itself: nothing else needs the libraries that fine-tune.
$(VENV)/.installed-integrations: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable ".[transformers,integrations,lightning,examples]"
	touch $@

demo: $(INSTALLED) ## train on real data inside a memory limit in which the target batch does not fit
	"$(PYTHON_ENV)" examples/digits.py

bench: $(BENCH_INSTALLED) ## time, memory, retries, search and several ranks beside others, some minutes; writes benchmarks/RESULTS.md
	PYTHONPATH=. "$(PYTHON_ENV)" benchmarks/results.py
	PYTHONPATH=. "$(PYTHON_ENV)" benchmarks/aftermath.py
	PYTHONPATH=. "$(PYTHON_ENV)" benchmarks/blocks.py

accuracy: $(BENCH_INSTALLED) ## predictions beside published peaks: make accuracy TABLE=peaks.csv [MODELS=100]
	PYTHONPATH=. "$(PYTHON_ENV)" benchmarks/accuracy.py --table "$(TABLE)" --models $(or $(MODELS),100) --output benchmarks/RESULTS.md

docs: $(DOCS_INSTALLED) ## build the site in site/, with no network; a warning is an error
	"$(PYTHON_ENV)" -m sphinx --fail-on-warning --keep-going --quiet --builder html --doctree-dir site/.doctrees docs site

# A file's tests stay in one process: they share what is dear to make. A third process works while ranks and programs
# that the tests of others have started wait for each other.
test: $(INSTALLED) ## run the tests on two cores and in random order, six minutes; SEED=1234 repeats one
	"$(PYTHON_ENV)" -m pytest --numprocesses 3 --dist loadfile --durations 40 --ignore tests/engines --ignore tests/integrations --ignore tests/service $(if $(SEED),--randomly-seed=$(SEED))

# Only the files in which something is marked are imported: half of the time is saved.
quick: $(INSTALLED) ## run the tests marked quick: under a minute, some of every package; SEED=1234 repeats an order
	"$(PYTHON_ENV)" -m pytest -m quick --numprocesses 2 --dist loadfile $(if $(SEED),--randomly-seed=$(SEED)) $$(grep -rlw 'mark\.quick' tests --include='test_*.py')

# One after another: each takes both cores.
test-engines: $(INTEGRATIONS_INSTALLED) $(if $(PROOF),$(RAY_INSTALLED)) ## train in accelerate and Lightning, with PROOF=1 in Ray too, which is 0.5 GB
	"$(PYTHON_ENV)" -m pytest tests/engines $(if $(SEED),--randomly-seed=$(SEED))

test-integrations: $(INTEGRATIONS_INSTALLED) ## train in the Trainers of Hugging Face, TRL, sentence-transformers and Lightning
	"$(PYTHON_ENV)" -m pytest --numprocesses 2 --dist loadfile tests/integrations $(if $(SEED),--randomly-seed=$(SEED))

test-service: $(SERVE_INSTALLED) ## test the service on SQLite and on a real PostgreSQL, in a browser where there is one; with PROOF=1 under load and kills too
	"$(PYTHON_ENV)" -m pytest --numprocesses 2 --dist loadfile tests/service $(if $(SEED),--randomly-seed=$(SEED))

serve: $(INSTALLED) ## show the service with a few runs in it, until Ctrl-C; PORT=8766 takes another port
	PYTHONPATH=. "$(PYTHON_ENV)" examples/team.py $(PORT)

test-gpu: $(INSTALLED) ## run the tests that need a CUDA device
	"$(PYTHON_ENV)" -m pytest -m gpu tests/gpu $(if $(SEED),--randomly-seed=$(SEED))

# torch's default build, which a configured index of CPU builds must not come before: so pip reads no configuration.
CUDA_PIP := PIP_CONFIG_FILE=/dev/null $(CUDA_VENV)/bin/python -m pip --isolated install --no-compile --constraint constraints.txt

$(CUDA_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(CUDA_VENV)/bin/python || "$(PYTHON)" -m venv $(CUDA_VENV)
	$(CUDA_PIP) torch nvidia-cuda-crt
	$(CUDA_PIP) --editable . hypothesis numpy pytest pytest-randomly pytest-timeout pytest-xdist transformers
	$(CUDA_VENV)/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None and "this torch has no CUDA")'
	touch $@

$(CUDA_VENV)/card/libcard.so: $(CUDA_VENV)/.installed $(wildcard tests/card/native/*)
	bash tests/card/native/build.sh $(CUDA_VENV) $(@D)

# The limit of time for one test is for a machine that is busy with much else; values cost what they cost on a CPU.
test-cuda: $(CUDA_VENV)/card/libcard.so ## run the tests of CUDA code on a card that computes nothing; needs no GPU
	tests/card/run $(CUDA_VENV) python -m pytest --numprocesses 2 --timeout 900 tests/gpu tests/card $(if $(SEED),--randomly-seed=$(SEED))

# Those of cards and frameworks are left out: their code is that of the other tests.
MOST_TESTS := --numprocesses 2 --dist loadfile --ignore tests/engines --ignore tests/integrations --ignore tests/service --ignore tests/gpu --ignore tests/card
OLDEST_SAMPLE := --numprocesses 2 --dist loadfile tests/training tests/undo tests/memory tests/batch tests/step tests/fitting tests/service/test_api.py tests/service/test_database.py
OLDEST_PYTHON := $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)

# Where the index has no CPU build of that torch, it comes with CUDA: the tests run beside either.
$(OLDEST_VENV)/.installed: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST_VENV)/bin/python || { python=$$(tests/find_python $(OLDEST_PYTHON)) && "$$python" -m venv $(OLDEST_VENV); }
	$(OLDEST_VENV)/bin/python -m pip install --constraint constraints-oldest.txt torch
	$(OLDEST_VENV)/bin/python -m pip install --constraint constraints-oldest.txt --editable ".[dev,examples,watch,serve]"
	touch $@

test-oldest: $(OLDEST_VENV)/.installed ## run the tests of steps and batches, with PROOF=1 most tests, on the oldest Python, torch and libraries
	$(OLDEST_VENV)/bin/python -m pytest $(if $(PROOF),$(MOST_TESTS),$(OLDEST_SAMPLE)) $(if $(SEED),--randomly-seed=$(SEED))

.venv-3.%/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || { python=$$(tests/find_python 3.$*) && "$$python" -m venv $(@D); }
	$(@D)/bin/python -m pip install --constraint constraints.txt torch
	$(@D)/bin/python -m pip install --constraint constraints.txt --editable ".[dev,examples,watch,serve]"
	touch $@

test-pythons: $(PYTHONS:%=.venv-%/.installed) ## the same tests with the tested torch: make test-pythons [PYTHONS="3.10 3.12 3.13"]
	for python in $(PYTHONS); do .venv-$$python/bin/python -m pytest $(MOST_TESTS) $(if $(SEED),--randomly-seed=$(SEED)) || exit; done

# With fresh examples unless SEED is given: the end of each output says which seed repeats them.
proof: bugs ## plant bugs, then run all tests whole: an error at every operation and on every rank, new examples; takes hours; SEED=1234 repeats them
	$(MAKE) PROOF=1 test test-engines test-integrations test-service test-cuda test-oldest

bugs: $(INTEGRATIONS_INSTALLED) ## plant each bug of tests/planted_bugs by itself; its tests must find it, five minutes
	PYTHONPATH=.:tests "$(PYTHON_ENV)" -m planted_bugs

lint: $(INSTALLED) ## ruff, mypy --strict, and the layers of the imports
	"$(PYTHON_ENV)" -m ruff check
	"$(PYTHON_ENV)" -m ruff format --check
	"$(PYTHON_ENV)" -m mypy --strict autobatch tests/api/typed_usage.py
	"$(PYTHON_ENV)" -c "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"

check: lint docs test ## lint, docs and test: CI runs it, then test-engines, test-integrations, test-service, test-cuda and test-oldest

clean: ## remove what tests, linters and builds leave behind; what is installed stays
	rm -rf build dist site *.egg-info htmlcov .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
