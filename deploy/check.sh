#!/usr/bin/env bash
# check.sh: what can be said of the chart, the alerts, the dashboard and the files in deploy/ without running them. With CI=true a tool that is missing is
# a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

missing() {
    echo "$1: NOT CHECKED, $2 is missing"
    [[ ${CI:-} != true ]]
}
have() { command -v "$1" >/dev/null; }

if ! have go; then
    missing "the chart and deploy/" go
    exit 0
fi
eval "$(cluster-tests/kubernetes/cluster env)"
schemas=$(cluster-tests/kubernetes/cluster schemas)

helm lint --strict --quiet helm/fanfare
helm-unittest helm/fanfare
# Of the kinds that Kubernetes has itself.
for values in replicas=1 replicas=3,store.kind=none \
    'replicas=3,store.kind=scylla,store.scylla.nodes={db:9042},autoscaling.enabled=true,ingress.enabled=true,ingress.hosts={a.example}'; do
    helm template fanfare helm/fanfare --set "$values" |
        kubeconform -strict -summary -schema-location "$schemas/{{.ResourceKind}}{{.KindSuffix}}.json"
done

# Kinds that operators define.
helm template fanfare helm/fanfare --set 'metrics.serviceMonitor.enabled=true,metrics.prometheusRule.enabled=true,gateway.enabled=true' \
    --set 'gateway.parentRefs[0].name=public,gateway.hostnames={rt.example.com}' |
    (cd deploy/check && go run . ..)

if have promtool; then
    promtool check rules helm/fanfare/files/alerts.yaml
    promtool test rules deploy/check/alerts_test.yaml
    # Each alert has a case.
    diff <(sed -n 's/.*- alert: //p' helm/fanfare/files/alerts.yaml | sort) \
        <(sed -n 's/.*alertname: //p' deploy/check/alerts_test.yaml | sort -u)
else
    missing "the alerts" promtool
fi
if have haproxy; then haproxy -c -f deploy/compose/haproxy.cfg; else missing "deploy/compose/haproxy.cfg" haproxy; fi
if have systemd-analyze; then
    unit=$(mktemp -d)
    trap 'rm -rf "$unit"' EXIT
    # It looks whether the program is there.
    sed "s#/usr/local/bin/fanfare#$(command -v true)#" deploy/fanfare.service >"$unit/fanfare.service"
    systemd-analyze verify "$unit/fanfare.service"
else
    missing "deploy/fanfare.service" systemd-analyze
fi
