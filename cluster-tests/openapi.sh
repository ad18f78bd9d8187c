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
node=
end() {
  [ -z "$node" ] || { kill "$node" 2>/dev/null && wait "$node" 2>/dev/null; } || true
  "$broker" end --dir "$data/broker" || true
  rm -rf "$data"
}
trap end EXIT
broker=$root/cluster-tests/rabbitmq/rabbitmq
not_with='^/realtime'
operations='requestToken revokeTokens'
if urls=$("$broker" start --dir "$data/broker"); then
  FANFARE_AMQP_URL=${urls% *}
  FANFARE_AMQP_MANAGEMENT_URL=${urls#* }
  export FANFARE_AMQP_URL FANFARE_AMQP_MANAGEMENT_URL
  operations="$operations listQueues putQueue getQueue editQueue deleteQueue listRules addRule deleteRule"
else
  echo "openapi: queues are NOT CHECKED, RabbitMQ cannot be started"
  if [ "${CI:-}" = true ]; then exit 1; fi
  not_with='^/(realtime|api/queues)'
fi
"$binary" serve --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --data-dir "$data/node" 2>"$data/log" &
node=$!

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

# /realtime is a socket and /realtime/sse has no end.
checks=not_a_server_error,status_code_conformance,content_type_conformance
cd "$data"
"$tools/bin/schemathesis" run "$root/docs/openapi.yaml" --url "http://$listen" \
  --header "authorization: Basic $basic" \
  --phases examples,coverage,fuzzing --max-examples 15 --seed 1 --continue-on-failure --no-color \
  --checks "$checks,response_schema_conformance,response_headers_conformance" \
  --exclude-path-regex "$not_with"

# Without a good answer only refusals were held to the page.
for operation in $operations; do
  if ! grep -q "^$operation 200$" "$OPENAPI_ANSWERS"; then
    echo "openapi: $operation was never answered with 200"
    exit 1
  fi
done
