.DEFAULT_GOAL := help
.PHONY: help run test lint bench peers go-peers bench-peers bench-cluster bench-store format-and-clippy components cargo-deny asyncapi

# Tools that are not part of a Rust toolchain go here and not into the user's own folders.
TARGET := $(or $(CARGO_TARGET_DIR),target)
TOOLS := $(abspath $(TARGET))/tools
CARGO_DENY = $(shell PATH="$(TOOLS)/bin:$$PATH" command -v cargo-deny || echo "$(TOOLS)/bin/cargo-deny")

help:
	@echo "make run    build for release and start a node on 127.0.0.1:8080"
	@echo "make test   format check, clippy, all tests; all that a change must pass"
	@echo "make lint   format check, clippy, and the dependencies: licences, duplicates, sources, advisories"
	@echo "make bench  measure this machine: deliveries, latency, memory, acked publishes, beside the floor"
	@echo "make bench-cluster  measure several nodes beside one, and a link alone"
	@echo "make bench-store  measure the shared store beside the driver alone; needs Java 17 and Maven"
	@echo "make peers  build the servers that the node is compared with: centrifuge, NATS and Sockudo; needs Go and protoc"
	@echo "make bench-peers  measure the node beside the floor and these"

run:
	cargo run --release --locked

# The tests of the cluster run the real binary, which is built with them: alone it would have its dependencies with other features, so most of
# them once more.
test: export NODE_IS_BUILT := true
test: format-and-clippy asyncapi
	cluster-tests/needs.sh chromium chromium chromium-browser google-chrome
	cluster-tests/needs.sh valgrind valgrind
	cluster-tests/needs.sh haproxy haproxy
	cluster-tests/needs.sh iproute2 ip
	cargo test --locked --workspace --no-run
	cluster-tests/cassandra/with $(MAKE) --no-print-directory test-all
	cluster-tests/cassandra/with --nodes 3 cargo test --locked --workspace --lib origin::history::scylla
	cluster-tests/openapi.sh

# Two halves side by side, since nodes of a cluster wait for each other more than they work; the test files go by their names, so that each half
# takes about as long; the examples in the docs are tried beside the longer one. Each says what it has to say when it has ended. What kills
# databases, and waits for them to come back, has the machine for itself.
.PHONY: test-all test-from-a test-from-pr test-docs
test-all:
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-from-pr test-from-a test-docs
	cargo test --locked --workspace --test 'sc*'

test-from-a:
	cargo test --locked --workspace --test '[!p-z]*' --test 'p[!r]*'

test-from-pr:
	cargo test --locked --workspace --lib --bins --test 'pr*' --test '[q-rt-z]*' --test 's[!c]*'

test-docs:
	cargo test --locked --workspace --doc

lint: format-and-clippy cargo-deny
	$(CARGO_DENY) --locked check bans licenses sources
	@if $(CARGO_DENY) --locked fetch db; then \
	  $(CARGO_DENY) --locked check --disable-fetch advisories; \
	else \
	  echo "advisories: NOT CHECKED, the database of advisories cannot be reached from here"; \
	fi

bench:
	cargo build --release --locked -p fanfare
	cargo run --release --locked -p fanfare-benches --bin bench -- run $(OPTIONS)

# The database has half of the cores, so that it has as much beside a node as beside the driver alone.
bench-store: OPTIONS := --apart
bench-cluster bench-store:
	cargo build --release --locked -p fanfare -p fanfare-benches
	cargo run --release --locked -p fanfare-benches --bin bench -- $(@:bench-%=%) --out "$(TARGET)/$@.json" $(OPTIONS)

# The peers are built once for each version. Go keeps its modules in its own cache, and checks them against go.sum.
PEERS := $(TOOLS)/peers

# As benches/src/run/peers/mod.rs has it.
OPEN_FILES := 20000
NATS := v2.15.2
SOCKUDO := 5.2.0

# As long as the published tables were measured, so that all of it is little more than two hours. With other options it may be a part, which is not published.
bench-peers: OPTIONS := --seconds 3
bench-peers: RUN := $(TARGET)/tools/bench-peers
bench-peers: PAGE = $(if $(filter command,$(origin OPTIONS)),$(RUN),docs/benchmarks)
bench-peers: bench-peers-needs peers
	cargo build --release --locked -p fanfare
	@mkdir -p "$(RUN)"
	cargo run --release --locked -p fanfare-benches --bin bench -- peers --peers "$(TARGET)/tools/peers" --plots "$(PAGE)" --out "$(RUN)/peers.json" $(OPTIONS)

peers: peers-needs go-peers $(PEERS)/sockudo-$(SOCKUDO)

go-peers: $(PEERS)/centrifuge $(PEERS)/nats-server-$(NATS)

$(PEERS)/centrifuge: benches/peers/centrifuge/main.go benches/peers/centrifuge/go.mod benches/peers/centrifuge/go.sum | go
	cd $(<D) && go build -mod=readonly -trimpath -o "$@" .

$(PEERS)/nats-server-$(NATS): | go
	@mkdir -p "$(PEERS)"
	GOBIN="$(PEERS)" go install -trimpath github.com/nats-io/nats-server/v2@$(NATS) && touch "$@"

$(PEERS)/sockudo-$(SOCKUDO):
	cargo install sockudo --locked --version "=$(SOCKUDO)" --root "$(PEERS)" && touch "$@"

# What would else be found missing only after minutes of building.
.PHONY: peers-needs bench-peers-needs
peers-needs: go
	@test -e "$(PEERS)/sockudo-$(SOCKUDO)" || command -v protoc >/dev/null || { echo "protoc is missing: install protobuf-compiler"; exit 1; }

bench-peers-needs:
	@files=$$(ulimit -Hn); test "$$files" = unlimited || test "$$files" -ge $(OPEN_FILES) || \
	  { echo "a process may open $$files files and $(OPEN_FILES) are needed: raise the hard limit (ulimit -Hn) and log in again"; exit 1; }

.PHONY: go
go:
	@command -v go >/dev/null || { echo "go is missing: install it from https://go.dev/dl"; exit 1; }

# The node also as it is shipped, since with the whole workspace it has the features of others' dependencies.
format-and-clippy: components
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo check --locked -p fanfare

# The page of the socket for tools, against the schema of AsyncAPI. Only this needs Node.js.
CHECK := $(TOOLS)/docs-check

asyncapi:
	@if command -v npm >/dev/null; then \
	  $(MAKE) --no-print-directory $(CHECK)/installed && node docs/check/asyncapi.mjs docs/asyncapi.yaml "$(CHECK)"; \
	else \
	  echo "docs/asyncapi.yaml: NOT CHECKED, npm is missing"; test "$$CI" != true; \
	fi

$(CHECK)/installed: docs/check/package.json docs/check/package-lock.json
	@mkdir -p "$(CHECK)" && cp $^ "$(CHECK)" && npm ci --prefix "$(CHECK)" --no-audit --no-fund && touch $@

components:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust from https://rustup.rs"; exit 1; }
	@cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
	@cargo clippy --version >/dev/null 2>&1 || rustup component add clippy

cargo-deny:
	@"$(CARGO_DENY)" --version || cargo install cargo-deny --locked --version '^0.20' --root "$(TOOLS)"
