PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test lint bench peers soak clean

demo: $(READY)  ## the whole story on two CPU cores, in under 8 minutes
	rm -rf demo-run
	$(BIN)/precisionctl demo --out demo-run

test: lint  ## what CI runs; a thread each, for there is a process to each core
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --maxprocesses 8 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## prints numbers, asserts none
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

peers: $(READY)  ## other programs, each in an environment of its own
	$(BIN)/pytest -q tests/peers

soak: $(READY)  ## many kills, big files and fuzzing (FUZZ_SECONDS for each target): 45 minutes and 10 GB of disk
	$(BIN)/pytest -q -s tests/soak

clean:
	rm -rf .venv .peers .fuzz .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

# Made again whenever what has to be installed changes. `ready` is written last, so a failed install is retried.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
