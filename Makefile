# The two commands of a newcomer are `make demo` and `make test`; both set up what they need.
PY := .venv/bin/python
PYTEST_ARGS ?=

.PHONY: demo test check protos bench setup clean

setup:
	@scripts/setup

demo: setup
	@$(PY) scripts/demo.py

test: setup
	$(PY) -m pytest $(PYTEST_ARGS)

check: setup
	@scripts/check

protos: setup
	$(PY) scripts/gen_protos.py

bench: setup
	$(PY) scripts/bench/cost.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis run build *.egg-info
