#!/bin/sh
# Installs moto, which stands in for the services of AWS, beside what is built, and says which Python has it.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
version=$(sed -n 's/^moto==//p' "$here/requirements.txt")
tools=${CARGO_TARGET_DIR:-$here/../../target}/tools/moto-$version

if ! cmp -s "$here/requirements.txt" "$tools/installed"; then
  python3 -m venv "$tools" >&2
  "$tools/bin/pip" install -q --disable-pip-version-check --no-cache-dir --no-deps -r "$here/requirements.txt" >&2
  cp "$here/requirements.txt" "$tools/installed"
fi
echo "$tools/bin/python"
