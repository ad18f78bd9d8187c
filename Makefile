.DEFAULT_GOAL := help
.PHONY: help run test check lint docs bench peers go-peers bench-peers bench-cluster bench-store bench-targets components cargo-deny asyncapi

# Tools that are not part of a Rust toolchain go here and not into the user's own folders.
TARGET := $(or $(CARGO_TARGET_DIR),target)
TOOLS := $(abspath $(TARGET))/tools
CARGO_DENY = $(shell PATH="$(TOOLS)/bin:$$PATH" command -v cargo-deny || echo "$(TOOLS)/bin/cargo-deny")

help:
	@echo "make run    build for release and start a node on 127.0.0.1:8080"
	@echo "make check  format check, clippy, unit tests and one test of a cluster: what each edit must pass, within minutes"
	@echo "make test   the same and all other tests: all that a change must pass"
	@echo "make lint   format check, clippy, and the dependencies: licences, duplicates, sources, advisories"
	@echo "make docs   build the pages as a site, and check its links"
	@echo "make bench  measure this machine: deliveries, latency, memory, acked publishes, beside the floor"
	@echo "make bench-cluster  measure several nodes beside one, and a link alone"
	@echo "make bench-store  measure the shared store beside the driver alone; needs Java 17 and Maven"
	@echo "make bench-targets  measure webhooks and queues: acks, events a second, and targets that fail; needs RabbitMQ"
	@echo "make peers  build the servers that the node is compared with: centrifuge, NATS and Sockudo; needs Go and protoc"
	@echo "make bench-peers  measure the node beside the floor and these"

run:
	cargo run --release --locked

# Everything that a change must pass. The tools are fetched while the tests are built. Tests that end databases run beside those of the
# generator, which mostly wait; tests that need the machine for themselves run alone.
test: export NODE_IS_BUILT := true
test:
	@cluster-tests/steps.sh format 'build!+tools+asyncapi' clippy test-nodes test-rest \
  test-one-database+test-three-databases+test-benches test-replicated test-kubernetes+test-chart test-js+deploy test-alone test-docs+docs openapi

# What each edit must pass: the same without databases, and of the tests of real nodes only the fan-out across a cluster.
check: export NODE_IS_BUILT := true
check:
	@cluster-tests/steps.sh format clippy 'check-build!' check-units+check-cluster

# How many tests run at once, most of which wait for nodes.
WIDE := 12
CARGO_TEST := cargo test --locked --workspace --no-fail-fast
# Test programs that have a step of their own; those of all crates besides are unit tests.
APART := nodes databases kubernetes alone chart baseline link instructions
PROGRAMS = $(basename $(notdir $(wildcard */tests/*.rs clients/*/tests/*.rs))) \
  $(notdir $(patsubst %/main.rs,%,$(wildcard */tests/*/main.rs clients/*/tests/*/main.rs)))
UNITS = $(foreach program,$(filter-out $(APART),$(PROGRAMS)),--test $(program))
REPLICATED := $(addprefix scylla::tests::,replicas nonce_claimed_by_many revocations_of_many members_that_change ids_while \
  ids::abandoned_id append_then_read history_survives)
OVER_THREE := over_three_nodes_of_the_database

.PHONY: format clippy build tools test-nodes test-rest test-units test-store test-one-database test-three-databases test-benches test-kubernetes \
  test-replicated test-replicated-store test-over-three \
  test-chart test-js deploy test-alone test-docs site openapi check-build check-units check-cluster

format: components
	cargo fmt --all --check

# The node also as it is shipped, since with the whole workspace it has the features of others' dependencies.
clippy: components
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo check --locked -p fanfare

# The tests of the cluster run the real binary, which is built with them: alone it would have its dependencies with other features, so most of
# them once more.
build:
	$(CARGO_TEST) --no-run

tools:
	cluster-tests/needs.sh chromium chromium chromium-browser google-chrome
	cluster-tests/needs.sh valgrind valgrind
	cluster-tests/needs.sh haproxy haproxy
	cluster-tests/needs.sh iproute2 ip
	cluster-tests/needs.sh prometheus promtool
	cluster-tests/needs.sh systemd systemd-analyze
	cluster-tests/kubernetes/cluster build || test "$$CI" != true
	cluster-tests/needs.sh openjdk-17-jre-headless java
	cluster-tests/needs.sh maven mvn
	cluster-tests/needs.sh curl curl
	cluster-tests/needs.sh rabbitmq-server rabbitmqctl
	cluster-tests/cassandra/cassandra fetch || test "$$CI" != true
	cluster-tests/openapi.sh --fetch
	$(MAKE) --no-print-directory $(MDBOOK)
	clients/js/with-node.sh
	cluster-tests/python.sh kosoku 0.1.0 || test "$$CI" != true
	cluster-tests/python.sh pika 1.4.4 || test "$$CI" != true
	cluster-tests/aws/moto.sh || test "$$CI" != true

test-nodes:
	$(CARGO_TEST) --test nodes -- --test-threads=$(WIDE) --skip scylla --skip history_copy

# Unit tests, those of the protocol and the client, and clusters over one database.
test-rest:
	cluster-tests/cassandra/with $(MAKE) --keep-going test-units test-store

test-units:
	$(CARGO_TEST) --lib --bins $(UNITS) -- --test-threads=$(WIDE) $(REPLICATED:%=--skip %)

test-store:
	$(CARGO_TEST) --test nodes -- scylla history_copy --test-threads=4 --skip $(OVER_THREE)

# Databases that tests stall and kill, of one node and of three.
test-one-database:
	cluster-tests/cassandra/with $(CARGO_TEST) --test databases -- --test-threads=3 --skip three_nodes

test-three-databases:
	$(CARGO_TEST) --test databases three_nodes -- --skip $(OVER_THREE)

# The generator of the benchmarks, which counts.
test-benches:
	$(CARGO_TEST) --test baseline --test link

# Nodes in the pods of a Kubernetes.
test-kubernetes:
	$(CARGO_TEST) --test kubernetes -- --test-threads=2

# What copies on several nodes can make different: who asks which node, what a quorum sees, and what many claim at once.
test-replicated:
	cluster-tests/cassandra/with --nodes 3 $(MAKE) --keep-going test-replicated-store test-over-three

test-replicated-store:
	$(CARGO_TEST) --lib -- $(REPLICATED)

test-over-three:
	$(CARGO_TEST) --test nodes --test databases $(OVER_THREE)

# The chart on a real control plane.
test-chart:
	$(CARGO_TEST) --test chart -- --test-threads=2

# The client for browsers and Node, with many clients and a browser: beside databases their nodes would have too little of the machine.
test-js:
	clients/js/with-node.sh npm run --silent build
	clients/js/with-node.sh npm test --silent
	clients/js/with-node.sh npm run --silent check

# The chart, the alerts and the files of deploy/ by themselves.
deploy:
	deploy/check.sh

test-alone:
	$(CARGO_TEST) --test alone --test instructions -- --test-threads=1

# Examples in doc comments, and the documentation of the code without a warning.
test-docs:
	$(CARGO_TEST) --doc
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps

openapi:
	cluster-tests/openapi.sh

check-build:
	$(CARGO_TEST) --no-run --lib --bins $(UNITS) --test nodes

check-units:
	$(CARGO_TEST) --lib --bins $(UNITS) -- --test-threads=$(WIDE) --skip scylla::tests

check-cluster:
	$(CARGO_TEST) --test nodes fan_out_across_nodes

lint: format clippy cargo-deny
	$(CARGO_DENY) --locked check bans licenses sources
	@if $(CARGO_DENY) --locked fetch db; then \
	  $(CARGO_DENY) --locked check --disable-fetch advisories; \
	else \
	  echo "advisories: NOT CHECKED, the database of advisories cannot be reached from here"; \
	fi

bench:
	cargo build --profile dist --locked -p fanfare
	cargo run --profile dist --locked -p fanfare-benches --bin bench -- run $(OPTIONS)

# The database has half of the cores, so that it has as much beside a node as beside the driver alone.
bench-store: OPTIONS := --apart
bench-cluster bench-store bench-targets:
	cargo build --profile dist --locked -p fanfare -p fanfare-benches
	cargo run --profile dist --locked -p fanfare-benches --bin bench -- $(@:bench-%=%) --out "$(TARGET)/$@.json" $(OPTIONS)

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
	cargo build --profile dist --locked -p fanfare
	@mkdir -p "$(RUN)"
	cargo run --profile dist --locked -p fanfare-benches --bin bench -- peers --peers "$(TARGET)/tools/peers" --plots "$(PAGE)" --out "$(RUN)/peers.json" $(OPTIONS)

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

# The packages that the checks of the pages need.
CHECK := $(TOOLS)/docs-check
MDBOOK := $(TOOLS)/bin/mdbook-0.5.4

# The pages as a site: without a warning, and with links that lead somewhere.
docs: $(MDBOOK)
	clients/js/with-node.sh $(MAKE) -C "$(CURDIR)" --no-print-directory site

site: $(CHECK)/installed
	node docs/site/build.mjs $(MDBOOK) "$(CHECK)" "$(TARGET)/site"

$(MDBOOK):
	cargo install mdbook --locked --version =0.5.4 --root "$(TOOLS)/mdbook"
	@mkdir -p "$(@D)" && mv "$(TOOLS)/mdbook/bin/mdbook" "$@"

# The page of the socket for tools, against the schema of AsyncAPI.
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
