#!/bin/sh
# Installs kosoku, which drives the case files of the Autobahn test suite, beside what is built, and says which Python has it.
set -eu

version=0.1.0
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
tools=${CARGO_TARGET_DIR:-$root/target}/tools/kosoku-$version

if ! "$tools/bin/python" -c 'import kosoku' >/dev/null 2>&1; then
  python3 -m venv "$tools" >&2
  "$tools/bin/pip" install -q --disable-pip-version-check --no-cache-dir --no-deps "kosoku==$version" >&2
fi
echo "$tools/bin/python"
