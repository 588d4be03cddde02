# `make help` lists what there is. PYTHON chooses the interpreter of the environment (3.11 to 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help setup train test lint bench compare report video play speed datasets binary d4rl d3rlpy libraries
.DEFAULT_GOAL := help

help: ## this list
	@sed -nE 's/^([a-z0-9]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 17

setup: $(VENV)/installed ## make .venv with the pinned requirements; does nothing when nothing changed

$(VENV)/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "onramp needs Python 3.11 to 3.13; this is $$($(PYTHON) --version): make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

train: setup ## train SAC on HalfCheetah-v4 (ARGS="--env Hopper-v4 --seed 2" for more)
	$(BIN)/python algos/sac.py $(ARGS)

test: setup ## run the tests (ARGS="-k resume" for some)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: setup ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup ## the runs of a suite, in parallel (SUITE=smoke; docs/sweeps.md)
	$(BIN)/python bench/sweep/sweep.py $(or $(SUITE),smoke) $(ARGS)

compare: setup ## how many more seeds to say that A beats B (SUITE=online-1m ARGS="--names sac td3" runs them)
	$(BIN)/python bench/report/compare.py $(if $(SUITE),--suite $(SUITE)) $(ARGS)

video: setup $(VENV)/video ## an mp4 of a trained policy, without a display too (RUN=runs/sac__Hopper-v4__1)
	$(BIN)/python tools/video.py $(RUN) $(ARGS)

play: setup ## a trained policy in MuJoCo's viewer (RUN=runs/sac__Hopper-v4__1)
	$(BIN)/python tools/video.py $(RUN) --play $(ARGS)

report: setup ## results/report.html, the docs' tables and the figures, from the raw data in results/
	$(BIN)/python bench/report/report.py $(ARGS)

speed: setup $(if $(filter wsrl expo,$(ARGS)),,$(VENV)-$(if $(filter iql cql,$(ARGS)),d3rlpy,peers)/installed) ## steps/s beside Stable-Baselines3 and SBX, or d3rlpy (ARGS="--algo iql", DEVICE=cuda)
	$(BIN)/python bench/speed/speed.py $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

d3rlpy: setup $(VENV)-d3rlpy/installed ## train d3rlpy's IQL or CQL, evaluated as ours (bench/checks/d3rlpy_run.py says how)
	PYTHONPATH=. D4RL_SUPPRESS_IMPORT_ERROR=1 $(VENV)-d3rlpy/bin/python bench/checks/d3rlpy_run.py $(ARGS)

datasets: setup ## make our own suite of datasets, and describe it in results/datasets
	$(BIN)/python tools/datasets.py $(ARGS)

binary: setup ## the Adroit binary tasks' datasets (tools/adroit_binary.py says how)
	$(BIN)/python tools/adroit_binary.py $(ARGS)

d4rl: setup $(VENV)-d4rl/installed ## hold our D4RL reader equal to D4RL's own package
	$(BIN)/python bench/checks/compare_d4rl.py $(ARGS)

libraries: setup $(VENV)-libraries/installed ## check that Minari, d3rlpy and TorchRL read what collect writes
	$(BIN)/python bench/checks/compare_libraries.py $(ARGS)

$(VENV)/video: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[video]'
	@touch $@

$(VENV)-d4rl/installed: bench/checks/d4rl-requirements.txt
	$(PYTHON) -m venv $(VENV)-d4rl
	$(VENV)-d4rl/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(VENV)-d4rl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps d4rl==1.1
	@touch $@

$(VENV)-d3rlpy/installed: bench/speed/d3rlpy-requirements.txt
	$(PYTHON) -m venv $(VENV)-d3rlpy
	$(VENV)-d3rlpy/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(VENV)-d3rlpy/bin/python -m pip install --quiet --disable-pip-version-check --no-deps d4rl==1.1 gymnasium==1.4.0
	@touch $@

$(VENV)-libraries/installed: bench/checks/libraries-requirements.txt
	$(PYTHON) -m venv $(VENV)-libraries
	$(VENV)-libraries/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(VENV)-libraries/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gymnasium==1.4.0 gymnasium-robotics==1.4.2
	@touch $@

$(VENV)-peers/installed: bench/speed/peers-requirements.txt
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check -r bench/speed/peers-requirements.txt
	@touch $@
