# `make demo` and `make test` work on a fresh clone: each makes the virtual environment .venv first if it is missing.

PYTHON := .venv/bin/python

# What the caller's shell has set for other Python projects must not reach ours.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONSAFEPATH PYTHONDONTWRITEBYTECODE
unexport VIRTUAL_ENV PIP_USER PIP_TARGET PIP_PREFIX PIP_CONSTRAINT

.PHONY: help demo test test-wide test-full lint bench gpu compare walk scale tables venv

help:
	@echo "make demo       train a small GPT with Muon and with Adam on the CPU, resume it, draw the losses"
	@echo "make test       run the tests"
	@echo "make test-wide  run a wider subset, as CI does after make test"
	@echo "make test-full  run all tests, with the long matrices"
	@echo "make lint       check style and types"
	@echo "make bench      time Newton-Schulz and steps on several ranks beside public peers, count a step"
	@echo "make gpu        check the package on a GPU and leave verdicts; without one, say what it would do"
	@echo "make compare    train a small GPT by the recommended line of each optimizer, and by AdamW at three rates"
	@echo "make walk       count the files that a gradient passes in one step of each optimizer"
	@echo "make scale      simulate a rank of thousands: plans, host time of steps, what ranks say to each other"
	@echo "make tables     write the tables of the docs that follow from megatron_eopt/family.py"

demo: venv
	@$(PYTHON) examples/demo.py

# Two workers of one thread each, for two cores: what tests share in a file is made once.
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadfile

test: venv
	@$(PYTEST) -m "not full and not wide"

test-wide: venv
	@$(PYTEST) -m "wide and not full"

test-full: venv
	@$(PYTEST)

lint: venv
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy

bench: venv
	@$(PYTHON) scripts/bench/newton_schulz.py
	@$(PYTHON) scripts/bench/step.py
	@$(PYTHON) scripts/bench/peers.py

# PYTHON=python3 takes what is installed there, without an environment of its own and without network.
gpu: $(if $(filter file,$(origin PYTHON)),venv)
	@$(PYTHON) scripts/bench/gpu.py

compare: venv
	@$(PYTHON) scripts/bench/recommended.py

walk: venv
	@$(PYTHON) scripts/bench/walk.py

scale: venv
	@$(PYTHON) scripts/bench/scale.py

tables: venv
	@$(PYTHON) scripts/tables.py

venv:
	@scripts/bootstrap.sh
