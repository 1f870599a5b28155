{{/* Labels that select the pods of a part; of workers with their shape. Arguments: root, component, shape. */}}
{{- define "torchrelay.selector" -}}
app.kubernetes.io/name: torchrelay
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .shape }}
torchrelay/shape: {{ . }}
{{- end }}
{{- end }}

{{/* Labels of objects and pods. Arguments: as torchrelay.selector. */}}
{{- define "torchrelay.labels" -}}
{{ include "torchrelay.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{/* What all pods share: rights, account, pull secrets. Arguments: root, component. */}}
{{- define "torchrelay.pod" -}}
serviceAccountName: {{ .root.Release.Name }}-{{ .component }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* What all containers share. Arguments: root, image. */}}
{{- define "torchrelay.container" -}}
image: {{ printf "%s/%s:%s" .root.Values.image.repository .image (.root.Values.image.tag | default .root.Chart.AppVersion) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* The variables of a service's settings. Arguments: root, role, own (values, or sources as maps), settings. */}}
{{- define "torchrelay.env" -}}
{{- $values := .root.Values }}
{{- $secret := dict "secretKeyRef" (dict "name" $values.secret "key" (printf "%s-nats-url" .role)) }}
{{- $env := dict "host" "0.0.0.0" "nats_url" $secret "nats_replicas" $values.nats.replicas }}
{{- with $values.nats.prefix }}{{ $_ := set $env "nats_prefix" . }}{{ end }}
{{- if $values.metrics.enabled }}
{{- $_ := set $env "metrics_port" $values.metrics.port }}
{{- $_ := set $env "metrics_host" "0.0.0.0" }}
{{- end }}
{{- if index $values.tls .role }}
{{- $_ := set $env "tls_ca_file" "/tls/ca.crt" }}
{{- $_ := set $env "tls_cert_file" "/tls/tls.crt" }}
{{- $_ := set $env "tls_key_file" "/tls/tls.key" }}
{{- end }}
{{- range $field, $value := merge $env .own .settings }}
- name: TORCHRELAY_{{ upper $field }}
{{- if kindIs "map" $value }}
  valueFrom: {{ toJson $value }}
{{- else if and (kindIs "float64" $value) (eq $value (floor $value)) }}
  value: {{ int64 $value | quote }}
{{- else }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The variables that a service's credentials file is derived with. Arguments: root. */}}
{{- define "torchrelay.credentialsContainer" -}}
- name: credentials
  {{- include "torchrelay.container" . | nindent 2 }}
  command: {{ concat (list "torchrelay-credentials") .arguments | toJson }}
  env:
    - name: TORCHRELAY_CLUSTER_KEY
      valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: cluster-key}}
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: NODE_NAME
      valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {memory: 128Mi}
  volumeMounts:
    - {name: credentials, mountPath: /credentials}
{{- end }}

{{/* Arguments: root, role. */}}
{{- define "torchrelay.tlsMount" -}}
{{- if index .root.Values.tls .role }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "torchrelay.tlsVolume" -}}
{{- with index .root.Values.tls .role }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* Arguments: root. */}}
{{- define "torchrelay.metricsPort" -}}
{{- if .root.Values.metrics.enabled }}
- {name: metrics, containerPort: {{ .root.Values.metrics.port }}}
{{- end }}
{{- end }}

{{/* Probes by the program of the images, as the kubelet's own gRPC probe shows no certificate. A service whose event
loop stands still ends itself; liveness replaces one that answers and cannot serve. Arguments: port. */}}
{{- define "torchrelay.probes" -}}
startupProbe:
  exec: {command: [torchrelay-health, "127.0.0.1:{{ .port }}"]}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 60
livenessProbe:
  exec: {command: [torchrelay-health, "127.0.0.1:{{ .port }}"]}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
{{- end }}

{{/* Not empty if KEDA scales a shape of workers. Arguments: root. */}}
{{- define "torchrelay.hasKeda" -}}
{{- range .root.Values.workers }}{{ if .keda }}yes{{ end }}{{ end }}
{{- end }}
