# `make demo` and `make test` first install what they need.
CARGO ?= cargo
PROFILE ?= release
VMFERRY := target/$(if $(filter release,$(PROFILE)),release,debug)/vmferry
PROFILE_FLAG := $(if $(filter release,$(PROFILE)),--release,)

.PHONY: help setup setup-tests build demo demo-qemu demo-libvirt demo-fleet check test test-busy \
	test-all msrv crates lint model soak reliability fuzz bench package package-test clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

setup: ## Install the build dependencies (compiler, Rust)
	@scripts/setup

build: setup ## Build the vmferry command
	@. scripts/environment && $(CARGO) build --locked $(PROFILE_FLAG) --package vmferry-cli

demo: build ## Migrate a guest between two processes on this machine
	@$(VMFERRY) demo $(DEMO_FLAGS)

demo-qemu: build ## Migrate a QEMU guest between two network namespaces (root); or MODE=carried
	@scripts/setup-qemu
	@. scripts/environment && $(CARGO) build --locked $(PROFILE_FLAG) --package vmferry-qemu-lab
	@scripts/demo-qemu $(MODE)

demo-libvirt: build ## Move a guest of libvirt between two hosts of this machine and back (root)
	@scripts/setup-qemu
	@scripts/setup-libvirt
	@. scripts/environment && VMFERRY=$(abspath $(VMFERRY)) \
		$(CARGO) run --locked --quiet $(PROFILE_FLAG) --package vmferry-libvirt-lab

demo-fleet: build ## Move guests of a fleet while an etcd and an agent are killed (root)
	@scripts/setup-qemu
	@scripts/setup-etcd
	@. scripts/environment && $(CARGO) build --locked $(PROFILE_FLAG) --package vmferry-qemu-lab
	@VMFERRY=$(abspath $(VMFERRY)) scripts/demo-fleet

check test test-busy test-all: export CARGO := $(CARGO)

setup-tests: setup ## Install the test dependencies; fetch QEMU and a browser into target/
	@scripts/setup-tests

check: setup-tests ## Check what has changed since the last tested commit, or BASE=COMMIT
	@. scripts/environment && scripts/check $(BASE)

test-busy: setup-tests ## Run all tests as on a busy host: half of the processors (root)
	@. scripts/environment && scripts/run-tests --busy --workspace

test: setup-tests ## Run all tests, and a sample of the long ones
	@. scripts/environment && scripts/run-tests --workspace

test-all: setup-tests ## Run all tests, including the long ones
	@. scripts/environment && VMFERRY_TEST_ALL=1 scripts/run-tests --workspace \
		--features vmferry-cli/long-tests,vmferry-libvirt-lab/long-tests,vmferry-qemu/long-tests
	@. scripts/environment && $(CARGO) test --locked --workspace --test quick -- --ignored
	@$(MAKE) msrv crates

msrv: setup ## Check the command with the oldest supported Rust (needs rustup)
	@. scripts/environment && scripts/msrv

crates: setup ## Package every published crate and build each from its package
	@. scripts/environment && scripts/crates

lint: setup ## Check formatting, clippy and documentation for warnings
	@. scripts/environment && $(CARGO) fmt --all --check
	@. scripts/environment && $(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@. scripts/environment && RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps

model: setup ## Model-check the handover, also with each rule removed
	@. scripts/environment && \
		$(CARGO) run --locked --release --quiet --package vmferry-model -- $(MODEL_FLAGS)

soak: setup ## Simulate random fault schedules for MINUTES=10
	@. scripts/environment && \
		$(CARGO) run --locked --release --quiet --package vmferry-sim -- \
		--minutes $(or $(MINUTES),10) $(SOAK_FLAGS)

reliability: setup-tests ## Inject every fault in every phase; write docs/reliability.md (root)
	@. scripts/environment && scripts/reliability $(TESTS)

fuzz: setup ## Fuzz the decoders for SECONDS=60 each (needs nightly Rust and cargo-fuzz)
	@. scripts/environment && scripts/fuzz $(or $(SECONDS),60) $(TARGET)

bench: build setup-tests ## Run all benchmarks or NAME=engine, …; QUICK=1 for a short trial
ifdef NAME
	@. scripts/environment && $(CARGO) run --locked --release --package vmferry-bench -- \
		$(NAME) $(if $(QUICK),--quick) $(BENCH_FLAGS)
else
	@. scripts/environment && CARGO="$(CARGO)" scripts/bench-all $(if $(QUICK),--quick) $(BENCH_FLAGS)
endif

package: setup ## Make the Debian package in target/package
	@. scripts/environment && scripts/package

package-test: package ## Install, use and remove the package in a minimal Debian (root)
	@scripts/package-test

clean: ## Remove build output
	$(CARGO) clean
