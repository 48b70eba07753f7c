# Every target makes its own virtual environment first, in VENV, with the best Python it finds
# (scripts/find_python.sh), and installs again only when the requirements have changed.
#
#   make demo      train and serve adapters on a tiny model
#   make test      the quick tests
#   make lint      ruff, formatting included
#   make clean     removes the environments and everything else that was made
#
#   make PYTHON=/path/to/python VENV=.venv-other test

VENV ?= .venv
PYTHON ?=
QUICK = not slow and not parity and not gpu
export PYTHON

.PHONY: demo test lint clean

demo: $(VENV)/installed
	$(VENV)/bin/lora-moe-jax demo

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -m "$(QUICK)"

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf .venv* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .jax_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: pyproject.toml $(wildcard constraints/*.txt)
	@bash scripts/make_venv.sh $(VENV)
	@touch $@
