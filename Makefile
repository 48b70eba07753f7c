# Every target makes its own virtual environment first, in VENV, with the best Python it finds
# (scripts/find_python.sh), and installs again only when the requirements have changed.
#
#   make demo      train and serve adapters on a tiny model
#   make test      the quick tests
#   make lint      ruff, formatting included
#   make aot       compiles kernels for GPUs and TPUs, without either (downloads their compilers)
#   make clean     removes the environments and everything else that was made
#
#   make PYTHON=/path/to/python VENV=.venv-other test
#   make QUICK=slow SEED=any test       a few of the slow tests, other ones with every seed

VENV ?= .venv
PYTHON ?=
QUICK = not slow and not parity and not gpu
PARALLEL = -n auto --maxprocesses=4
# Which tests stay together tests/conftest.py says.
GROUPED = --dist loadscope --no-loadscope-reorder
export PYTHON
# Tests start many processes: what Python compiles is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE =

TESTS = tests
AOT = tests/pallas_kernels/test_gpu_ahead_of_time.py tests/pallas_kernels/test_tpu_compile.py \
	tests/pallas_kernels/test_tpu_attention.py::test_decoding_compiles_for_every_generation \
	tests/serving/test_kernel_programs.py::test_the_compiler_finds_them \
	tests/serving/test_tpu_steps.py
COMPILERS = jax-cuda13-plugin jax-cuda13-pjrt libtpu

.PHONY: demo test lint aot clean

demo: $(VENV)/installed
	$(VENV)/bin/lora-moe-jax demo

# Most of the tests' time is XLA's compiling, a third of which is optimizing.
XLA_FLAGS ?= --xla_backend_optimization_level=0
test: export XLA_FLAGS := $(XLA_FLAGS)
test: $(VENV)/installed
	$(VENV)/bin/python -m pytest $(PARALLEL) $(GROUPED) -m "$(QUICK)" $(if $(SEED),--sample $(SEED)) $(TESTS)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

aot: $(VENV)/compilers/installed
	JAX_PLATFORMS=cpu PYTHONPATH=$(CURDIR)/$(VENV)/compilers \
	    $(VENV)/bin/python -m pytest $(PARALLEL) --dist worksteal -m "$(QUICK)" $(AOT)

clean:
	rm -rf .venv* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .jax_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The aot extra, in a folder of its own: where jax finds these it looks for a GPU.
$(VENV)/compilers/installed: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
	    --upgrade --target $(VENV)/compilers --constraint constraints/py312.txt $(COMPILERS)
	@touch $@

$(VENV)/installed: pyproject.toml $(wildcard constraints/*.txt)
	@bash scripts/make_venv.sh $(VENV)
	@touch $@
