# `make help` lists the targets. PYTHON selects the interpreter of the virtual environment (3.11 to 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help setup train test lint bench compare evaluate export report plot site video play speed datasets ogbench binary d4rl d3rlpy libraries faults soak versions
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -nE 's/^([a-z0-9]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 17

setup: $(VENV)/installed ## create .venv with the pinned requirements, if they changed (LOCKED=1 checks hashes)

$(VENV)/installed: requirements.txt requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "onramp needs Python 3.11 to 3.13, but this is $$($(PYTHON) --version): use make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(if $(LOCKED),$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(LOCKED),--no-deps -e .,-r requirements.txt)
	@touch $@

train: setup ## train SAC on HalfCheetah-v4 (flags: ARGS="--env Hopper-v4 --seed 2")
	$(BIN)/python algos/sac.py $(ARGS)

test: setup ## run the tests (some of them: ARGS="-k resume")
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: setup ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup ## run a suite of algorithms, tasks and seeds in parallel (SUITE=smoke; docs/sweeps.md)
	$(BIN)/python bench/sweep/sweep.py $(or $(SUITE),smoke) $(ARGS)

compare: setup ## test whether A beats B, and run more seeds if needed (SUITE=online-1m ARGS="--names sac td3")
	$(BIN)/python bench/report/compare.py $(if $(SUITE),--suite $(SUITE)) $(ARGS)

evaluate: setup ## evaluate trained policies (RUN=runs/sac__Hopper-v4__1 or POLICY=sac/Hopper-v4)
	$(BIN)/python tools/evaluate.py $(or $(POLICY),$(RUN)) $(ARGS)

export: setup $(VENV)/export ## write a trained policy as an ONNX file (RUN=runs/sac__Hopper-v4__1)
	$(BIN)/python tools/export.py $(or $(POLICY),$(RUN)) $(ARGS)

video: setup $(VENV)/video ## write an mp4 of a trained policy, also without a display (RUN=runs/sac__Hopper-v4__1)
	$(BIN)/python tools/video.py $(or $(POLICY),$(RUN)) $(ARGS)

play: setup ## show a trained policy in MuJoCo's viewer (RUN=runs/sac__Hopper-v4__1)
	$(BIN)/python tools/video.py $(or $(POLICY),$(RUN)) --play $(ARGS)

report: setup ## make results/report.html, tables and figures from the raw data in results/ (your own runs: RUNS=runs)
	$(BIN)/python bench/report/report.py $(if $(RUNS),--runs $(RUNS)) $(ARGS)

plot: setup ## draw learning curves of your own runs, as PNG and HTML (RUNS="runs/sac* runs/td3*")
	$(BIN)/python bench/pages/plot.py $(RUNS) $(ARGS)

site: setup $(VENV)-site/installed ## build the documentation as a web site in site/, with all links checked
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(VENV)-site/bin/mkdocs build --strict --quiet

speed: setup $(if $(filter wsrl expo fql fql-small after-sac stream_ac,$(ARGS)),,$(VENV)-$(if $(filter iql cql,$(ARGS)),d3rlpy,peers)/installed) ## compare steps/s with Stable-Baselines3 and SBX, or d3rlpy (ARGS="--algo iql", DEVICE=cuda)
	$(BIN)/python bench/speed/speed.py $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

d3rlpy: setup $(VENV)-d3rlpy/installed ## train d3rlpy's IQL or CQL with onramp's evaluation (see bench/checks/d3rlpy_run.py)
	PYTHONPATH=. D4RL_SUPPRESS_IMPORT_ERROR=1 $(VENV)-d3rlpy/bin/python bench/checks/d3rlpy_run.py $(ARGS)

datasets: setup ## make onramp's own datasets, and describe them in results/datasets
	$(BIN)/python tools/datasets.py $(ARGS)

ogbench: setup $(VENV)/ogbench ## make OGBench datasets with its oracles (TASKS="scene-play cube-single-play" TRANSITIONS=1000000)
	$(BIN)/python -m tools.ogbench_data $(TASKS) $(if $(TRANSITIONS),--transitions $(TRANSITIONS)) $(ARGS)

binary: setup ## make the datasets of Adroit's binary tasks (see tools/adroit_binary.py)
	$(BIN)/python tools/adroit_binary.py $(ARGS)

d4rl: setup $(VENV)-d4rl/installed ## check that our D4RL reader equals D4RL's own package
	$(BIN)/python bench/checks/compare_d4rl.py $(ARGS)

libraries: setup $(VENV)-libraries/installed ## check that Minari, d3rlpy and TorchRL read what collect writes
	$(BIN)/python bench/checks/compare_libraries.py $(ARGS)

faults: setup ## kill runs, damage files and give hostile input (docs/reliability.md; ARGS="--seed 2 --cases 50")
	$(BIN)/python bench/faults/faults.py $(ARGS)

soak: setup ## interrupt three commands at random for six hours (docs/reliability.md; ARGS="--hours 1 --folder DIR")
	$(BIN)/python -m bench.faults.soak $(ARGS)

versions: setup ## run the tests with the lowest and the newest versions that pyproject.toml allows (ARGS="-k smoke")
	$(BIN)/python bench/checks/versions.py $(ARGS)

$(VENV)/video $(VENV)/export $(VENV)/ogbench: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(notdir $@)]'
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

$(VENV)-site/installed: docs/site-requirements.txt
	$(PYTHON) -m venv $(VENV)-site
	$(VENV)-site/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(VENV)-peers/installed: bench/speed/peers-requirements.txt
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check -r bench/speed/peers-requirements.txt
	@touch $@
