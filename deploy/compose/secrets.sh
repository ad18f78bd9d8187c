#!/bin/sh
# Makes the secrets of compose.yaml, unless they are there.
set -eu
cd "$(dirname "$0")"
mkdir -p secrets
chmod 711 secrets
make() { test -e "secrets/$1" || openssl rand "-$2" 32 >"secrets/$1"; }
make cluster-key base64
make admin-token hex
make secret hex
printf '%s.main\n' "$(cat secrets/secret)" >secrets/key
# Beside the directory, which names it.
cp -f secrets/secret directory/secret
# The nodes run as a user of their own, who reads these.
chmod 444 secrets/cluster-key secrets/admin-token directory/secret
chmod 400 secrets/key
