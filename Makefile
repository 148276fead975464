PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

GPU_CALLS := gpu-1 gpu-2 gpu-3 gpu-4
.PHONY: demo test pytest lint docs bench gpu $(GPU_CALLS) peers soak clean

demo: $(READY)  ## the whole story on two CPU cores, in five to nine minutes
	rm -rf demo-run
	$(BIN)/precisionctl demo --out demo-run

test: $(READY)  ## what CI runs: linters, types and pages while the tests begin, for checking types takes one core a minute
	$(MAKE) --jobs=2 pytest lint docs

pytest: .venv/compiled  ## on the same examples each time (`soak` draws new ones); a thread each, for there is a process to each core
	OMP_NUM_THREADS=1 $(BIN)/pytest -q --hypothesis-profile=ci -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## the pages as a site, in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(READY)  ## for a quiet machine with 20 GB of disk: prints numbers and puts tables into docs, asserts none
	$(BIN)/python benchmarks/convert.py --pairs 3 --into docs/benchmarks.md
	$(BIN)/python benchmarks/four_bits.py --pairs 2 --into docs/four_bits.md
	$(BIN)/python benchmarks/planning.py --into docs/benchmarks.md
	for script in startup largest_batch switch; do $(BIN)/python benchmarks/$$script.py || exit 1; done

RESULTS := benchmarks/results
gpu: $(GPU_CALLS)  ## on a machine with an FP8 GPU and Transformer Engine in PYTHON: four calls of under six minutes, and the tables
	$(PYTHON) benchmarks/gpu.py --merge $(RESULTS)/gpu-[1-4].json --out $(RESULTS)/gpu.json
	$(PYTHON) benchmarks/gpu.py --table $(RESULTS)/gpu.json --into docs/benchmarks.md
	rm $(RESULTS)/gpu-[1-4].json

gpu-1: SECTIONS := tests,truth,curves,profile
gpu-2: SECTIONS := speed,core
gpu-3: SECTIONS := products,serving
gpu-4: SECTIONS := peers,casts
$(GPU_CALLS):
	-$(PYTHON) benchmarks/gpu.py --sections $(SECTIONS) $(if $(LIMIT),--limit $(LIMIT)) --out $(RESULTS)/$@.json

peers: $(READY)  ## other programs, each in an environment of its own: 40 minutes and 10 GB the first time
	$(BIN)/pytest -q tests/peers

soak: $(READY)  ## what is marked so, properties on new examples, many kills, big files and fuzzing (FUZZ_SECONDS for each target): three quarters of an hour and 4 GB of disk
	$(BIN)/pytest -q -s tests/soak
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "soak or hypothesis" -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

clean:  ## everything that git ignores
	rm -rf .venv .peers .fuzz .gpu .mypy_cache .pytest_cache .ruff_cache .hypothesis dist demo-run site
	find . -name __pycache__ -prune -exec rm -r {} +

# Of what is installed a fifth is ever imported, and compiled then: for tests by one process, which takes 40 s, not by each
# of their own. So Python must be allowed to keep it. What fails here fails in the tests too, and is shown there.
unexport PYTHONDONTWRITEBYTECODE
.venv/compiled: $(READY)
	-$(BIN)/pytest -q --collect-only > $@

# Made again whenever what has to be installed changes. `ready` is written last, so a failed install is retried.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --upgrade pip  # Python 3.11's own takes half a minute longer
	grep == constraints.txt | xargs -n 12 -P 2 $(BIN)/pip install --quiet --no-compile --no-deps  # which takes one twice as long
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@
