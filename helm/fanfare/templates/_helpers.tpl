{{- define "fanfare.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* 40 characters leave room for the names of pods and of what belongs to them. */}}
{{- define "fanfare.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "fanfare.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "fanfare.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* A StatefulSet cannot change these: nothing of a version may be among them. */}}
{{- define "fanfare.selector" -}}
app.kubernetes.io/name: {{ include "fanfare.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: node
{{- end }}

{{- define "fanfare.labels" -}}
app.kubernetes.io/name: {{ include "fanfare.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "fanfare.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
{{- end }}

{{- define "fanfare.directorySecret" -}}
{{- default (printf "%s-directory" (include "fanfare.fullname" .)) .Values.directory.existingSecret }}
{{- end }}

{{- define "fanfare.clusterKeySecret" -}}
{{- default (printf "%s-cluster-key" (include "fanfare.fullname" .)) .Values.clusterKey.existingSecret }}
{{- end }}

{{- define "fanfare.adminTokenSecret" -}}
{{- default (printf "%s-admin-token" (include "fanfare.fullname" .)) .Values.adminToken.existingSecret }}
{{- end }}

{{/* The name of the Secret with the key of `helm test`, or nothing. */}}
{{- define "fanfare.testKeySecret" -}}
{{- if .Values.test.keySecret.name }}
{{- .Values.test.keySecret.name }}
{{- else if not .Values.directory.existingSecret }}
{{- include "fanfare.directorySecret" . }}
{{- end }}
{{- end }}

{{/* What a Secret of this release has under a key, in base64, or nothing. */}}
{{- define "fanfare.kept" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name }}
{{- with $found }}{{ with .data }}{{ get . $.key }}{{ end }}{{ end }}
{{- end }}

{{/* Nodes find each other unless the store is that of one node. */}}
{{- define "fanfare.isCluster" -}}
{{- if ne .Values.store.kind "embedded" }}true{{ end }}
{{- end }}

{{- define "fanfare.replicasMax" -}}
{{- if .Values.autoscaling.enabled }}{{ .Values.autoscaling.maxReplicas }}{{ else }}{{ .Values.replicas }}{{ end }}
{{- end }}

{{/* Of a release that scales by itself, as many as there are: without a number the API takes one. */}}
{{- define "fanfare.replicas" -}}
{{- if .Values.autoscaling.enabled }}
{{- $found := lookup "apps/v1" "StatefulSet" .Release.Namespace (include "fanfare.fullname" .) }}
{{- $now := 0 }}
{{- with $found }}{{ $now = int .spec.replicas }}{{ end }}
{{- max $now (int .Values.autoscaling.minReplicas) }}
{{- else }}
{{- .Values.replicas }}
{{- end }}
{{- end }}

{{- define "fanfare.grace" -}}
{{- $least := add .Values.preStopSeconds .Values.drainSeconds 5 }}
{{- $grace := .Values.terminationGracePeriodSeconds }}
{{- if kindIs "invalid" $grace }}
{{- add $least 5 }}
{{- else if lt (int64 $grace) $least }}
{{- fail (printf "terminationGracePeriodSeconds is %d: a pod that stops takes preStopSeconds + drainSeconds + 5 = %d seconds" (int64 $grace) $least) }}
{{- else }}
{{- int64 $grace }}
{{- end }}
{{- end }}

{{- define "fanfare.servicePort" -}}
{{- if .Values.service.port }}{{ .Values.service.port }}{{ else if .Values.tls.existingSecret }}443{{ else }}80{{ end }}
{{- end }}

{{/* A quantity of Kubernetes in bytes, as a text, number or exponent; 0 where it is none. */}}
{{- define "fanfare.bytes" -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 }}
{{- $text := . | toString }}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" $text }}
{{- $unit := trimPrefix $number $text }}
{{- if and $number (hasKey $units $unit) }}
{{- mulf (float64 $number) (get $units $unit) | int64 }}
{{- else }}0{{- end }}
{{- end }}

{{- define "fanfare.check" -}}
{{- with .Values.autoscaling }}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}
{{- fail (printf "autoscaling.minReplicas is %d, more than autoscaling.maxReplicas, which is %d" (int .minReplicas) (int .maxReplicas)) }}
{{- end }}
{{- end }}
{{- if and (eq .Values.store.kind "embedded") (gt (int (include "fanfare.replicasMax" .)) 1) }}
{{- fail "store.kind is embedded, which is the store of one node: with more replicas, or autoscaling, set it to scylla or none" }}
{{- end }}
{{- if and (eq .Values.store.kind "scylla") (not .Values.store.scylla.nodes) }}
{{- fail "store.kind is scylla: set store.scylla.nodes to host:port of nodes of the database" }}
{{- end }}
{{- if and .Values.store.scylla.user (not .Values.store.scylla.passwordSecret.name) }}
{{- fail "store.scylla.user is set: set store.scylla.passwordSecret.name to the Secret with its password" }}
{{- end }}
{{- if and (eq .Values.store.kind "embedded") (not .Values.persistence.enabled) }}
{{- fail "store.kind is embedded, which is kept on the volume of the pod: enable persistence, or set store.kind to none" }}
{{- end }}
{{- if and .Values.tls.existingSecret (or .Values.ingress.enabled .Values.gateway.enabled) }}
{{- fail "tls.existingSecret makes the nodes speak TLS, and the Ingress or HTTPRoute would speak plain HTTP to them: end TLS at one of the two" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- fail "ingress is enabled: set ingress.hosts" }}
{{- end }}
{{- if and .Values.gateway.enabled (not .Values.gateway.parentRefs) }}
{{- fail "gateway is enabled: set gateway.parentRefs" }}
{{- end }}
{{- if and .Values.proxyProtocol (not .Values.trustedProxies) }}
{{- fail "proxyProtocol is set: set trustedProxies to the networks of the load balancer" }}
{{- end }}
{{- if and .Values.autoscaling.enabled (not (or .Values.autoscaling.cpu .Values.autoscaling.connections)) }}
{{- fail "autoscaling is enabled: set autoscaling.cpu or autoscaling.connections" }}
{{- end }}
{{- $connections := int64 (dig "limits" "connections" 0 (default dict .Values.config)) }}
{{- $memory := include "fanfare.bytes" (dig "limits" "memory" "" (default dict .Values.resources)) | int64 }}
{{- /* 13 KiB: TLS and a few channels, by docs/operations/size.md. A pod refuses clients from nine tenths of its memory on. */}}
{{- $needed := mul $connections 13312 }}
{{- if and $memory (gt (mul $needed 10) (mul $memory 9)) }}
{{- fail (printf "config.limits.connections is %d: at 13 KiB each they take %d MiB, more than nine tenths of resources.limits.memory (%d MiB)" $connections (div $needed 1048576) (div $memory 1048576)) }}
{{- end }}
{{- if hasKey (default dict .Values.podAnnotations) "fanfare.toml" }}
{{- fail "podAnnotations.fanfare.toml holds the settings of a node: set them under config" }}
{{- end }}
{{- range $own := list "data_dir" "directory" "listen" "tls_cert" "tls_key" "trusted_proxy" "proxy_protocol" "admin_listen" "admin_token_file" "node_id" "gossip_listen" "peer_listen" "advertise" "seed" "cluster_key_file" "peer_cert" "peer_key" "peer_ca" "store" "scylla_node" "scylla_keyspace" "scylla_schema" "scylla_replication" "scylla_datacenter" "scylla_user" "scylla_password_file" "webhook_allow" "amqp_url" "amqp_management_url" "drain_timeout" }}
{{- if hasKey $.Values.config $own }}
{{- fail (printf "config.%s is set by other values of the chart" $own) }}
{{- end }}
{{- end }}
{{- end }}

{{/* One setting as a line of TOML. YAML has one kind of numbers, which templates take for fractions. */}}
{{- define "fanfare.setting" -}}
{{- $value := .value }}
{{- if kindIs "slice" $value }}
{{- $texts := list }}
{{- range $value }}{{ $texts = append $texts (toJson (toString .)) }}{{ end }}
{{- .name }} = [{{ join ", " $texts }}]
{{- else if kindIs "string" $value }}
{{- .name }} = {{ toJson $value }}
{{- else if kindIs "bool" $value }}
{{- /* YAML takes a bare on or off for a boolean. */}}
{{- .name }} = {{ if has .name (list "auth" "io_uring") }}{{ ternary "on" "off" $value | toJson }}{{ else }}{{ $value }}{{ end }}
{{- else if eq (int64 $value | float64) (float64 $value) }}
{{- .name }} = {{ int64 $value }}
{{- else }}
{{- .name }} = {{ $value }}
{{- end }}
{{- end }}

{{- define "fanfare.config" -}}
data_dir = "/var/lib/fanfare"
directory = {{ printf "/etc/fanfare/directory/%s" .Values.directory.key | toJson }}
listen = {{ printf "%s:8080" .Values.bindAddress | toJson }}
admin_listen = {{ printf "%s:8081" .Values.bindAddress | toJson }}
admin_token_file = "/etc/fanfare/config/keys/admin-token"
drain_timeout = "{{ .Values.drainSeconds }}s"
store = {{ .Values.store.kind | toJson }}
{{- if include "fanfare.isCluster" . }}
gossip_listen = {{ printf "%s:7946" .Values.bindAddress | toJson }}
peer_listen = {{ printf "%s:7947" .Values.bindAddress | toJson }}
cluster_key_file = "/etc/fanfare/config/keys/cluster-key"
seed = [{{ printf "%s-headless.%s.svc:7946" (include "fanfare.fullname" .) .Release.Namespace | toJson }}]
{{- end }}
{{- if .Values.tls.existingSecret }}
tls_cert = "/etc/fanfare/tls/tls.crt"
tls_key = "/etc/fanfare/tls/tls.key"
{{- end }}
{{- if .Values.trustedProxies }}
{{ include "fanfare.setting" (dict "name" "trusted_proxy" "value" .Values.trustedProxies) }}
proxy_protocol = {{ ternary "on" "off" .Values.proxyProtocol | toJson }}
{{- end }}
{{- if .Values.peerTls.existingSecret }}
peer_cert = "/etc/fanfare/peer-tls/tls.crt"
peer_key = "/etc/fanfare/peer-tls/tls.key"
peer_ca = "/etc/fanfare/peer-tls/ca.crt"
{{- end }}
{{- with .Values.store.scylla }}
{{- if eq $.Values.store.kind "scylla" }}
{{ include "fanfare.setting" (dict "name" "scylla_node" "value" .nodes) }}
scylla_keyspace = {{ toJson .keyspace }}
scylla_schema = {{ toJson .schema }}
{{- if .replication }}
scylla_replication = {{ int64 .replication }}
{{- end }}
{{- if .datacenter }}
scylla_datacenter = {{ toJson .datacenter }}
{{- end }}
{{- if .user }}
scylla_user = {{ toJson .user }}
scylla_password_file = "/etc/fanfare/config/keys/scylla-password"
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.webhookAllow }}
{{ include "fanfare.setting" (dict "name" "webhook_allow" "value" .Values.webhookAllow) }}
{{- end }}
{{- range $name, $value := omit .Values.config "limits" }}
{{ include "fanfare.setting" (dict "name" $name "value" $value) }}
{{- end }}
{{- with .Values.config.limits }}

[limits]
{{- range $name, $value := . }}
{{ include "fanfare.setting" (dict "name" $name "value" $value) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "fanfare.testSelector" -}}
app.kubernetes.io/component: test
{{- end }}
