{{/* The labels that select a part's pods: list ROOT PART. */}}
{{- define "rankmill.selector" -}}
app.kubernetes.io/name: rankmill
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Name and labels of an object: list ROOT PART. */}}
{{- define "rankmill.metadata" -}}
{{- $root := index . 0 -}}
name: {{ $root.Release.Name }}-{{ index . 1 }}
labels:
  {{- include "rankmill.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
  helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{- define "rankmill.image" -}}
{{- with (index . 0).Values.image -}}
{{ .repository }}:{{ with .version }}{{ . }}-{{ end }}
{{- end }}{{ index . 1 }}
{{- end }}

{{/* The queues of a part's settings, as a list in JSON: list ROOT SETTINGS. */}}
{{- define "rankmill.queues" -}}
{{- $queues := list -}}
{{- range splitList "," ((index . 1).queue | default (index . 0).Values.settings.queue | default "rankmill") -}}
{{- $queues = append $queues (trim .) -}}
{{- end -}}
{{- $queues | toJson -}}
{{- end }}

{{/* Where Redis is. rq and rankmill read different variables. */}}
{{- define "rankmill.redis" -}}
{{- with .Values.redis }}
{{- if not .external }}
- {name: REDIS_HOST, value: "{{ $.Release.Name }}-valkey:6379"}
- {name: REDIS_PASSWORD_FILE, value: /run/secrets/rankmill/redis_password}
{{- else }}
- name: REDIS_URL
  {{- if .url }}
  value: {{ .url | quote }}
  {{- else }}
  valueFrom: {secretKeyRef: {name: {{ $.Values.secret }}, key: redis_url}}
  {{- end }}
- {name: RQ_REDIS_URL, value: $(REDIS_URL)}
{{- end }}
{{- end }}
{{- end }}

{{/* rankmill's settings as variables: list ROOT, what the chart itself sets, and the part's. */}}
{{- define "rankmill.settings" -}}
{{- $root := index . 0 -}}
{{- $known := ($root.Files.Get "files/schema.json" | fromJson).properties -}}
{{- $settings := dict -}}
{{- range list (index . 1) $root.Values.settings (index . 2) }}
{{- range $name, $value := . }}{{ $_ := set $settings $name $value }}{{ end }}
{{- end }}
{{- range $name, $value := $settings }}
{{- if not (hasKey $known $name) }}{{ fail (printf "settings: rankmill has no setting %q" $name) }}{{ end }}
{{- if kindIs "slice" $value }}{{ $value = join "," $value }}{{ end }}
- {name: RANKMILL_{{ upper $name }}, value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}}
{{- end }}
{{- range $name, $value := $root.Values.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* What a key of the Secret gives a pod, if it is there: list ROOT VARIABLE KEY. */}}
{{- define "rankmill.secret" -}}
- name: {{ index . 1 }}
  valueFrom: {secretKeyRef: {name: {{ (index . 0).Values.secret }}, key: {{ index . 2 }}, optional: true}}
{{- end }}

{{- define "rankmill.confined" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{/* Makes the home in its volume: list ROOT VARIANT. Everybody may write to an emptyDir, and a worker trusts no cache there. */}}
{{- define "rankmill.home" -}}
initContainers:
  - name: home
    image: {{ include "rankmill.image" . }}
    imagePullPolicy: {{ (index . 0).Values.image.pullPolicy }}
    command: [mkdir, -p, -m, "700", /volume/home]
    resources: {limits: {cpu: 100m, memory: 64Mi}}
    securityContext: {{ include "rankmill.confined" (index . 0) }}
    volumeMounts: [{name: home, mountPath: /volume}]
{{- end }}

{{/* What every container of rankmill's mounts; all else of its file system is read-only. */}}
{{- define "rankmill.mounts" -}}
- {name: home, mountPath: /home/rankmill, subPath: home}
- {name: tmp, mountPath: /tmp}
{{- if not .Values.redis.external }}
- {name: passwords, mountPath: /run/secrets/rankmill, readOnly: true}
{{- end }}
{{- if .Values.redis.tlsSecret }}
- {name: redis-tls, mountPath: /etc/rankmill/redis, readOnly: true}
{{- end }}
{{- end }}

{{- define "rankmill.volumes" -}}
- {name: home, emptyDir: {}}
- {name: tmp, emptyDir: {}}
{{- if not .Values.redis.external }}
- {name: passwords, secret: {secretName: {{ .Values.secret }}, items: [{key: redis_password, path: redis_password}]}}
{{- end }}
{{- with .Values.redis.tlsSecret }}
- {name: redis-tls, secret: {secretName: {{ . }}}}
{{- end }}
{{- end }}

{{/* A pod's spec: list ROOT, its own fields as YAML, and the part's `pod`. */}}
{{- define "rankmill.pod" -}}
{{- $root := index . 0 -}}
{{- $own := index . 1 | fromYaml -}}
{{- with $own.Error }}{{ fail . }}{{ end -}}
{{- $pod := dict "enableServiceLinks" false "automountServiceAccountToken" false -}}
{{- with $root.Values.image.pullSecrets }}
{{- $secrets := list }}{{ range . }}{{ $secrets = append $secrets (dict "name" .) }}{{ end }}
{{- $_ := set $pod "imagePullSecrets" $secrets }}
{{- end }}
{{- $user := $own.user | int -}}
{{- $_ := set $pod "securityContext" (dict "runAsNonRoot" true "runAsUser" $user "runAsGroup" $user "fsGroup" $user
      "seccompProfile" (dict "type" "RuntimeDefault")) -}}
{{- mergeOverwrite $pod (omit $own "user") (deepCopy $root.Values.pod) (deepCopy (index . 2)) | toYaml -}}
{{- end }}
