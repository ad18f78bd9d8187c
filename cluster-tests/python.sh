#!/bin/sh
# python.sh PACKAGE VERSION: installs a Python package without others beside what is built, and prints the Python that has it.
set -eu

package=${1:?which package?}
version=${2:?which version?}
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
tools=${CARGO_TARGET_DIR:-$root/target}/tools/$package-$version

if ! "$tools/bin/python" -c "import $package" >/dev/null 2>&1; then
  python3 -m venv "$tools" >&2
  "$tools/bin/pip" install -q --disable-pip-version-check --no-cache-dir --no-deps "$package==$version" >&2
fi
echo "$tools/bin/python"
