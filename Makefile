# Each target does its own set-up in .venv and needs only Python 3.10+, make and a C++ compiler.
# TORCH chooses the torch to install into a new .venv, e.g. TORCH=torch==2.13.0
PYTHON ?= python3
TORCH ?= torch>=2.10
BIN := .venv/bin

.PHONY: demo test fuzz sanitize sanitize-cuda bench docs build wheel audit test-wheel lint format clean

demo: build
	$(BIN)/python examples/demo.py

test: build
	$(BIN)/python -m pytest -q

# 20,000 random calls on each device.
fuzz: build
	$(BIN)/python -m pytest -q -m slow tests/fuzz

# The CPU module under the address and the undefined behaviour sanitizer. Left out is what starts
# compilers and processes, or measures memory.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitize: .venv/ready
	CFLAGS="$(SANITIZERS) -g1" LDFLAGS="$(SANITIZERS)" FUSED_OPS_BUILD=cpu $(BIN)/python setup.py \
	  -q build --build-base build/sanitize --build-lib build/sanitize/lib
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitize/lib LD_PRELOAD="$(foreach library, \
	  libasan.so libubsan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(library)))" \
	  $(BIN)/pytest -q --capture=sys tests/triplet tests/svgd tests/batch_triplet tests/fuzz \
	  -m "not cuda and not timing" -k "not compile and not export and not memory and not distributed"

# Every CUDA kernel in every policy; compute-sanitizer comes with the CUDA toolkit.
sanitize-cuda: build
	for op in triplet svgd batch_triplet; do for tool in memcheck racecheck initcheck synccheck; do \
	  for part in 1 2 3 4 5 6 7 8; do echo $$op $$tool $$part/8; done; done; done | \
	xargs -P 8 -L 1 sh -c 'compute-sanitizer --tool $$1 --error-exitcode 1 \
	  $(BIN)/python tests/sanitized_calls.py $$0 $$1 $$2'

bench: build
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.report

# The documentation site, in site/. Not --quiet, which would hide warnings from --strict.
docs: .venv/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A wheel for this Python, in dist: any torch from 2.10 on, every architecture unless
# TORCH_CUDA_ARCH_LIST says otherwise. Objects stay in build, so a second one is quick.
wheel: .venv/ready-release
	rm -rf dist build/wheel build/lib* build/bdist*
	$(BIN)/python -m build -q --no-isolation --wheel --outdir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --strip --exclude libtorch.so \
	  --exclude libtorch_cpu.so --wheel-dir dist build/wheel/*.whl

audit: .venv/ready-release
	$(BIN)/python tools/audit_wheel.py dist/*.whl

# MATRIX is what tools/test_wheel.py takes, by default the torch of .venv.
test-wheel: .venv/ready-release
	$(BIN)/python tools/test_wheel.py $(MATRIX) dist/*.whl

build: .venv/ready
	$(BIN)/python setup.py -q build_ext --inplace

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files 'csrc/*' | xargs $(BIN)/clang-format --dry-run --Werror
	git ls-files | xargs $(BIN)/codespell
	$(BIN)/python tools/support_matrix.py --check

format: .venv/ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files 'csrc/*' | xargs $(BIN)/clang-format -i

# The editable install only links the sources (no native module); build_ext then compiles
# incrementally, which pip's own editable build does not.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q "$(TORCH)" "setuptools>=77" ninja "pybind11>=3.0"
	FUSED_OPS_BUILD=none $(BIN)/python -m pip install -q --no-build-isolation -e ".[test,examples]"
	touch $@

.venv/ready-dev: .venv/ready
	FUSED_OPS_BUILD=none $(BIN)/python -m pip install -q --no-build-isolation -e ".[dev]"
	touch $@

.venv/ready-docs: .venv/ready
	FUSED_OPS_BUILD=none $(BIN)/python -m pip install -q --no-build-isolation -e ".[docs]"
	touch $@

.venv/ready-release: .venv/ready
	FUSED_OPS_BUILD=none $(BIN)/python -m pip install -q --no-build-isolation -e ".[release]"
	touch $@

clean:
	rm -rf build dist site *.egg-info fused_ops/_C*.so
