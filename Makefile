# make check | make test | make test-all | make matrix | make coverage | make demo | make bench | make docs: each sets up what it
# needs in .venv, once. make gpu uses the torch that is installed. tools/setup_env.py says which torch is installed.
PYTHON ?= python3
# make test TORCH=2.15.0: in an environment of that version, ENVS/torch-2.15.0, which several checkouts may use in turn.
TORCH ?=
ENVS ?= .venvs
VENV ?= $(if $(TORCH),$(ENVS)/torch-$(TORCH),.venv)
PY = $(VENV)/bin/python
# Stamp of an environment with everything, and of one with a single extra; a command that needs only that extra takes either.
READY = $(VENV)/.ready
with = $(if $(wildcard $(READY)),$(READY),$(READY)-$(1))
RANKS ?= 2

.PHONY: again setup check test test-all matrix private coverage golden lint demo bench gpu peers docs clean

setup: $(READY)

again:

# Each time with TORCH: another checkout may have used the environment since.
$(READY): pyproject.toml tools/setup_env.py $(if $(TORCH),again)
	$(PYTHON) tools/setup_env.py $(VENV) $(if $(TORCH),--torch $(TORCH))
	touch $@

$(READY)-%: pyproject.toml tools/setup_env.py $(if $(TORCH),again)
	$(PYTHON) tools/setup_env.py $(VENV) --extras $* $(if $(TORCH),--torch $(TORCH))
	touch $@

# Types are checked against the default torch: other versions annotate their functions otherwise.
lint: $(READY)
	$(PY) -m ruff check fsdp_dynamo graph_passes tests benchmarks examples tools
	$(PY) -m ruff format --check fsdp_dynamo graph_passes tests benchmarks examples tools
	$(if $(TORCH),,$(PY) -m mypy)
	$(VENV)/bin/lint-imports --no-cache

# Before each commit: lint, types and a quick test of every folder (tests/support/tiers.py); 2 minutes on 2 cores.
check: lint
	$(PY) -m pytest tests -m smoke

# Before each push: all tests but those that are slow; 10 to 25 minutes on 2 cores, by the machine.
test: lint
	$(PY) -m pytest tests

# All tests. Those that measure time need a quiet machine: SELECT="not timing" leaves them out.
SELECT ?=
test-all: lint
	$(PY) -m pytest tests -m "$(SELECT)"

# The tests of private names and the check tier on every supported torch, the check tier with every Python that is found,
# all of `make test` on the oldest and the newest torch; writes docs/versions.md.
matrix: $(READY)
	$(PY) tools/matrix.py $(ENVS) $(ARGS)

# Writes docs/decisions/records/private-api.md and runs the tests that it names.
private: $(READY)
	$(PY) tools/private_api.py
	$(PY) -m pytest --confcutdir tests/private_api tests/private_api

# Lines of both packages that the test command runs, its ranks and subprocesses included.
coverage: $(READY)
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest tests
	$(PY) -m coverage combine -q
	$(PY) -m coverage report

# Brings the graphs in tests/graph_mode/test_golden.py (and other expected texts) up to date.
golden: $(READY)
	EXPECTTEST_ACCEPT=1 $(PY) -m pytest tests/graph_mode/test_golden.py

demo: $(call with,demo)
	$(PY) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/demo/train.py $(ARGS)

bench: $(READY)
	$(PY) benchmarks/bench.py $(ARGS)

# On a machine with a GPU, whose torch is used as it is; ARGS=--dry-run runs every part on a CPU.
gpu:
	$(PYTHON) benchmarks/gpu.py $(ARGS)

peers: $(READY)
	$(PYTHON) tools/setup_env.py $(VENV) --peers

# docs/ and the API reference as HTML: open build/site/index.html. Dead links fail.
docs: $(call with,docs)
	$(PY) -m mkdocs build

clean:
	rm -rf $(VENV) runs build dist *.egg-info
