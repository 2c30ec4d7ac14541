# The two commands of a newcomer are `make demo` and `make test`; both set up what they need.
PY := .venv/bin/python
PYTEST_ARGS ?=

.PHONY: demo test test-vllm check protos bench setup clean

setup:
	@scripts/setup

demo: setup
	@$(PY) scripts/demo.py

# etcd: tests start servers of their own; openssl makes their certificates; haproxy: an example is tried with it.
test:
	@scripts/setup etcd-server openssl haproxy
	$(PY) -m pytest $(PYTEST_ARGS)

# Outside CI: real engines on the CPU. Downloads 2.7 GB the first time; see docs/real-engines.md.
test-vllm: setup
	$(PY) -m scripts.real_engines.install
	$(PY) -m pytest tests/vllm $(PYTEST_ARGS)

check: setup
	@scripts/check

protos: setup
	$(PY) scripts/gen_protos.py

bench: setup
	$(PY) scripts/bench/cost.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis run build *.egg-info
