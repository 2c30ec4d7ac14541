# The two commands of a newcomer are `make demo` and `make test`; both set up what they need.
PY := .venv/bin/python
PYTEST_ARGS ?=

.PHONY: demo test test-processes test-rest test-vllm check protos bench setup clean

setup:
	@scripts/setup

demo: setup
	@$(PY) scripts/demo.py

# etcd: tests start servers of their own; openssl makes their certificates; haproxy: an example is tried with it.
# Two halves side by side: most of both is waiting for processes. With PYTEST_ARGS they are one run.
test:
	@scripts/setup etcd-server openssl haproxy
ifeq ($(PYTEST_ARGS),)
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-processes test-rest
else
	$(PY) -m pytest $(PYTEST_ARGS)
endif

test-processes:
	$(PY) -m pytest -p no:cacheprovider tests/process

test-rest:
	$(PY) -m pytest --ignore=tests/process

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
