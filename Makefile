# `make demo` and `make test` need nothing but this file: what is missing is installed first.
CARGO ?= cargo
PROFILE ?= release
VMFERRY := target/$(if $(filter release,$(PROFILE)),release,debug)/vmferry
PROFILE_FLAG := $(if $(filter release,$(PROFILE)),--release,)

.PHONY: help setup setup-tests build demo demo-qemu test test-all msrv crates lint model soak reliability fuzz bench package package-test clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

setup: ## Install what the build needs (compiler, Rust)
	@scripts/setup

build: setup ## Build the vmferry command
	@. scripts/environment && $(CARGO) build --locked $(PROFILE_FLAG) --package vmferry-cli

demo: build ## Migrate a guest between two processes on this machine and show what happened
	@$(VMFERRY) demo $(DEMO_FLAGS)

demo-qemu: build ## Move a Linux guest from QEMU to QEMU between two network namespaces (root); MODE=carried for one that can't be attached
	@scripts/setup-qemu
	@. scripts/environment && $(CARGO) build --locked $(PROFILE_FLAG) --package vmferry-qemu-lab
	@scripts/demo-qemu $(MODE)

# Most tests wait for processes, links and guests more than they compute.
test test-all: export RUST_TEST_THREADS ?= $(shell echo $$((2 * $$(nproc))))

setup-tests: setup ## Install what the tests use, and fetch QEMU and a browser into target/
	@scripts/setup-tests

test: setup-tests ## Run all tests, with a sample of the long matrices
	@. scripts/environment && $(CARGO) test --locked --workspace --no-fail-fast

test-all: setup-tests ## Run all tests and the whole of the long matrices
	@. scripts/environment && VMFERRY_TEST_ALL=1 $(CARGO) test --locked --workspace --no-fail-fast \
		--features vmferry-cli/long-tests,vmferry-qemu/long-tests
	@. scripts/environment && $(CARGO) test --locked --workspace --test quick -- --ignored
	@$(MAKE) msrv crates

msrv: setup ## Build the command with the oldest Rust that README names (needs rustup)
	@. scripts/environment && scripts/msrv

crates: setup ## Package every crate that ships, as for a registry, and build each from its package
	@. scripts/environment && scripts/crates

lint: setup ## Formatting, clippy and documentation, without a warning
	@. scripts/environment && $(CARGO) fmt --all --check
	@. scripts/environment && $(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@. scripts/environment && RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps

model: setup ## Check the handover in every state that it can be in, and with each rule broken
	@. scripts/environment && $(CARGO) run --locked --release --quiet --package vmferry-model -- $(MODEL_FLAGS)

soak: setup ## Run simulated schedules of faults for MINUTES=10
	@. scripts/environment && $(CARGO) run --locked --release --quiet --package vmferry-sim -- --minutes $(or $(MINUTES),10) $(SOAK_FLAGS)

reliability: setup-tests ## Strike migrations with every fault at every moment, and render docs/reliability.md (root)
	@. scripts/environment && scripts/reliability $(TESTS)

fuzz: setup ## Fuzz the decoders for SECONDS=60 each (needs nightly Rust and cargo-fuzz, see testing/fuzz/README.md)
	@. scripts/environment && scripts/fuzz $(or $(SECONDS),60) $(TARGET)

bench: build setup-tests ## Run all benchmarks and make target/bench/index.html (QUICK=1: small), or the one that NAME says (engine, qemu, carried, …)
ifdef NAME
	@. scripts/environment && $(CARGO) run --locked --release --package vmferry-bench -- $(NAME) $(if $(QUICK),--quick) $(BENCH_FLAGS)
else
	@. scripts/environment && CARGO="$(CARGO)" scripts/bench-all $(if $(QUICK),--quick) $(BENCH_FLAGS)
endif

package: setup ## Make the Debian package, in target/package
	@. scripts/environment && scripts/package

package-test: package ## Install the package into a clean Debian, use it there, and remove it (root)
	@scripts/package-test

clean: ## Remove what was built
	$(CARGO) clean
