# `make demo` and `make test` do everything that they need by themselves: see tools/system.sh for what
# the system must have, tools/venv.sh for .venv, tools/build.sh for the build.

PY := .venv/bin/python
ARGS ?=
UCX_WHEEL = $(wildcard .venv/lib/python3*/site-packages/libucx/lib)
CXX_FILES = $(foreach folder,csrc/* csrc/*/* bindings tests/cpp,$(wildcard $(folder)/*.h $(folder)/*.cc))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-faults soak fuzz test-arm64 test-rdma test-vllm demo-vllm demo-gateway vllm-tools build build-tests test-tools lint-tools lint format types layers sanitize sanitize-faults valgrind docs bench bench-micro bench-peers-setup wheel clean

help:  ## print the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build:  ## set up .venv, build the extension, install the package as editable
	@tools/system.sh
	@tools/venv.sh build numpy
	@tools/build.sh release
	@tools/editable.sh

test-tools:
	@tools/system.sh --tests
	@tools/venv.sh build numpy test

build-tests: test-tools
	@tools/build.sh release --tests
	@tools/editable.sh

demo: build  ## move a KV cache between two processes (ARGS="--json" passes options on)
	@$(PY) -m kvxfer.demo $(ARGS)

test: build-tests  ## run the C++ tests, then the Python tests (ARGS="-k tcp" goes to pytest)
	@echo "==> C++ tests"
	@$(if $(UCX_WHEEL),KVXFER_UCX_PATH=$(abspath $(UCX_WHEEL))) build/release/kvxfer_tests --no-intro
	@echo "==> GPU kernels, as fibers on the CPU"
	@build/release/kvxfer_gpu_tests_32 --no-intro
	@build/release/kvxfer_gpu_tests_64 --no-intro
	@echo "==> Python tests"
	@$(PY) -m pytest tests $(ARGS)

test-faults: build-tests  ## run the fault campaign for 90 seconds (ARGS="--seed 7" passes options on)
	@PYTHONPATH=tests $(PY) -m faults.campaign --minutes 1.5 --steps 60 $(ARGS)

soak: build-tests  ## run the fault campaign for long (ARGS="--minutes 60 --json soak.json")
	@PYTHONPATH=tests $(PY) -m faults.campaign --minutes 60 --steps 400 $(ARGS)

fuzz: test-tools  ## fuzz every decoder with libFuzzer (needs clang; ARGS="--runs 10000000")
	@tools/fuzz.sh $(ARGS)

# Not part of `make test`: it needs a cross compiler and qemu.
test-arm64: test-tools  ## compile for arm64, run the tests of digest, codecs and packing under qemu
	@tools/arm64.sh $(ARGS)

vllm-tools: build-tests
	@tools/vllm.sh

# Not part of `make test`: where there is no soft-RoCE it builds a kernel to run under, once.
test-rdma: build-tests  ## test verbs on soft-RoCE, two hosts with two rails (ARGS="-x" goes to pytest)
	@tools/test_rdma.sh $(ARGS)

# Not part of `make test`: vLLM is large and its engines take their time to start.
test-vllm: vllm-tools  ## test the vLLM connector against vLLM in .venv-vllm (ARGS="-m slow" for the rest)
	@test -f build/vllm.skipped || \
		.venv-vllm/bin/python -m pytest tests/integrations tests/gateway/test_recipes.py -W default -o timeout=900 -m 'not slow' $(ARGS)

demo-vllm: vllm-tools  ## serve with a prefill and a decode engine of vLLM, compare with one engine
	@test -f build/vllm.skipped || \
		PYTHONPATH=tests/integrations .venv-vllm/bin/python -m rig.demo $(ARGS)

demo-gateway: vllm-tools  ## the same behind the gateway, under load; its prefill engine is killed
	@test -f build/vllm.skipped || \
		PYTHONPATH=tests:tests/integrations .venv-vllm/bin/python -m gateway.demo $(ARGS)

lint-tools:
	@tools/system.sh
	@tools/venv.sh build numpy lint

lint: lint-tools  ## ruff, clang-format and codespell, without changing anything
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@.venv/bin/clang-format --dry-run -Werror $(CXX_FILES)
	@.venv/bin/codespell

format: lint-tools  ## let ruff and clang-format put the files in order
	@$(PY) -m ruff check --fix --exit-zero --quiet .
	@$(PY) -m ruff format .
	@.venv/bin/clang-format -i $(CXX_FILES)

types: lint-tools  ## mypy --strict over kvxfer/ and integrations/
	@$(PY) -m mypy

layers: lint-tools  ## check who may include whom (docs/architecture.md)
	@$(PY) tools/check_layers.py

sanitize: test-tools  ## run the tests under ASan and UBSan, the C++ tests under TSan too
	@tools/sanitize.sh $(ARGS)

valgrind: build-tests  ## run the C++ tests of UCX under valgrind, which watches UCX itself too
	@tools/valgrind.sh $(ARGS)

sanitize-faults: test-tools  ## run the fault campaign under ASan and UBSan (ARGS="--minutes 10")
	@tools/sanitize.sh --campaign --minutes 1.5 --steps 60 $(ARGS)

docs: build  ## render the documentation into build/site
	@tools/venv.sh docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

bench: build  ## measure beside NIXL, Mooncake, UCX, sockets, memcpy; write docs/benchmarks.md
	@tools/venv.sh bench plot
	@$(PY) benches/bench_suite.py $(ARGS)

bench-micro: test-tools build  ## time plans, packing, codecs, digest, messages (pytest-benchmark)
	@$(PY) -m pytest benches/micro --benchmark-only --timeout 600 $(ARGS)

bench-peers-setup:  ## install the rivals that the benchmark compares with into .venv-peers (1.3 GB)
	@python3 -m venv .venv-peers
	@.venv-peers/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
	@benches/baselines/install.sh .venv-peers/bin/pip

wheel: build  ## build dist/*.whl and dist/*.tar.gz
	@$(PY) -m pip install --quiet --disable-pip-version-check build
	@$(PY) -m build

clean:  ## remove build trees, .venv and caches
	rm -rf build dist .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks *.egg-info
	rm -f kvxfer/_core*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
