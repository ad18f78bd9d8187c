#!/bin/sh
# needs.sh PACKAGE COMMAND...: sees to it that one of the commands is there, if need be from the Debian package. With CI=true
# it is a failure where that cannot be.
set -eu

package=$1
shift
for command in "$@"; do
  if command -v "$command" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  if ! apt-get install -y -q --no-install-recommends "$package"; then
    apt-get update -q && apt-get install -y -q --no-install-recommends "$package" && exit 0
  else
    exit 0
  fi
fi
echo "$package: NOT CHECKED WITH, it is missing and cannot be installed from here: install it by hand"
test "${CI:-}" != true
