#!/bin/sh
# Sees to it that there is a browser for cluster-tests/tests/browser. With CI=true it is a failure where there can be none.
set -eu

for browser in chromium chromium-browser google-chrome; do
  if command -v "$browser" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  if ! apt-get install -y -q --no-install-recommends chromium; then
    apt-get update -q && apt-get install -y -q --no-install-recommends chromium && exit 0
  else
    exit 0
  fi
fi
echo "browser: NOT CHECKED, chromium is missing and cannot be installed from here: install it by hand"
test "${CI:-}" != true
