#!/bin/sh
# Holds a live node to docs/openapi.yaml: no 5xx, and no answer that the page does not describe.
# Usage: cluster-tests/openapi.sh [--fetch | path of the fanfare binary]. With --fetch it only installs what it needs. With CI=true
# what cannot be checked is a failure.
set -eu

version=4.32.5
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
binary=${1:-${CARGO_TARGET_DIR:-$root/target}/debug/fanfare}
tools=${XDG_CACHE_HOME:-$HOME/.cache}/fanfare/schemathesis-$version

if ! "$tools/bin/schemathesis" --version >/dev/null 2>&1; then
  if ! { python3 -m venv "$tools" && "$tools/bin/pip" install -q "schemathesis==$version"; }; then
    echo "openapi: NOT CHECKED, schemathesis $version cannot be installed from here"
    if [ "${CI:-}" = true ]; then exit 1; else exit 0; fi
  fi
fi
[ "$binary" != --fetch ] || exit 0

data=$(mktemp -d)
"$binary" serve --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --data-dir "$data/node" 2>"$data/log" &
node=$!
trap 'kill "$node" 2>/dev/null || true; wait "$node" 2>/dev/null || true; rm -rf "$data"' EXIT

tries=0
until [ -s "$data/node/node.json" ]; do
  tries=$((tries + 1))
  if [ "$tries" -gt 300 ]; then cat "$data/log"; echo "openapi: the node did not start"; exit 1; fi
  sleep 0.1
done
listen=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["listen"])' "$data/node/node.json")
OPENAPI_KEY=$(tr -d '\n' <"$data/node/dev-key")
OPENAPI_ANSWERS=$data/answers
SCHEMATHESIS_HOOKS=$root/cluster-tests/openapi_hooks.py
export OPENAPI_KEY OPENAPI_ANSWERS SCHEMATHESIS_HOOKS
basic=$(printf %s "$OPENAPI_KEY" | base64 | tr -d '\n')

# Queues answer 503, as the page says, until a broker can be named; /realtime is a socket and /realtime/sse has no end.
checks=not_a_server_error,status_code_conformance,content_type_conformance
cd "$data"
"$tools/bin/schemathesis" run "$root/docs/openapi.yaml" --url "http://$listen" \
  --header "authorization: Basic $basic" \
  --phases examples,coverage,fuzzing --max-examples 15 --seed 1 --continue-on-failure --no-color \
  --checks "$checks,response_schema_conformance,response_headers_conformance" \
  --exclude-path-regex '^/(realtime|api/queues)'

# Without a good answer only refusals were held to the page.
for operation in requestToken revokeTokens; do
  if ! grep -q "^$operation 200$" "$OPENAPI_ANSWERS"; then
    echo "openapi: $operation was never answered with 200"
    exit 1
  fi
done
