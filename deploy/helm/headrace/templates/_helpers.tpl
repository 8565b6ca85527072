{{/* The start of every object's name: the release's, and what the names of its pods need stays within 63 characters. */}}
{{- define "headrace.fullname" -}}
{{- .Release.Name | replace "." "-" | trunc 30 | trimSuffix "-" -}}
{{- end -}}

{{/* The name of a component's Service, and of its other objects. Usage: (list $ "replay") */}}
{{- define "headrace.name" -}}
{{- printf "%s-%s" (include "headrace.fullname" (index . 0)) (index . 1 | replace "_" "-") -}}
{{- end -}}

{{/* Usage: (list $ "replay") */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 | replace "_" "-" }}
{{- end -}}

{{- define "headrace.labels" -}}
{{- $root := index . 0 -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{- define "headrace.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{/* The ports, those of deploy/docker-compose.yml. Others are chosen by the system: NCCL's, gloo's, the weight channel's. */}}
{{- define "headrace.ports" -}}
redis: 6379
replay: 8390
reward: 50390
reward-http: 8391
rollout: 8392
trainer: 8393
agents: 8394
agents-http: 8395
page: 8396
torchrun: 29500
{{- end -}}

{{/* Who connects to whom, and to which ports; "all" where the system chooses them. Nothing else is let through. */}}
{{- define "headrace.arrows" -}}
{{- $ports := include "headrace.ports" . | fromYaml -}}
{{- $redis := ternary (dict) (dict "redis" (list $ports.redis)) (ne .Values.redis.url "") -}}
{{- $arrows := dict
  "replay" (merge (dict "reward" (list $ports.reward)) $redis)
  "rollout" (merge (dict "trainer" "all") $redis)
  "trainer" (merge (dict "rollout" "all") $redis)
  "reward" (dict) -}}
{{- if or .Values.secrets.pull (contains "weights_from: store" .Values.config) -}}
{{- $_ := set $arrows.rollout "rollout" (list $ports.rollout) -}}
{{- end -}}
{{- if gt (int .Values.trainer.nodes) 1 -}}
{{- $_ := set $arrows.trainer "trainer" "all" -}}
{{- end -}}
{{- if .Values.page.enabled -}}
{{- $_ := set $arrows "page" (dict) -}}
{{- end -}}
{{- if .Values.agents.enabled -}}
{{- $_ := set $arrows "agents" (merge (dict "reward" (list $ports.reward) "rollout" (list $ports.rollout) "agents" (list $ports.agents)) $redis) -}}
{{- $_ := set $arrows.reward "agents" (list $ports.agents) -}}
{{- end -}}
{{- range .Values.environments -}}
{{- $name := printf "environment-%s" .name -}}
{{- $own := dict -}}
{{- if .attached -}}
{{- $_ := set $own "reward" (list $ports.reward) -}}
{{- else -}}
{{- $_ := set $arrows.reward $name (list .port) -}}
{{- end -}}
{{- if $.Values.agents.enabled -}}
{{- $_ := set $own "agents" (list $ports.agents) -}}
{{- end -}}
{{- $_ := set $arrows $name $own -}}
{{- end -}}
{{- toYaml $arrows -}}
{{- end -}}

{{/* The TCP ports that a component may open anywhere: those of the values, and of a Redis server of yours. */}}
{{- define "headrace.outbound" -}}
{{- $outbound := deepCopy .Values.networkPolicies.outbound -}}
{{- if .Values.redis.url -}}
{{- $ports := list -}}
{{- range regexFindAll ":[0-9]+" .Values.redis.url -1 -}}
{{- $ports = append $ports (trimPrefix ":" . | int) -}}
{{- end -}}
{{- range list "replay" "rollout" "trainer" "agents" -}}
{{- $_ := set $outbound . (concat (index $outbound . | default list) ($ports | default (list 6379)) | uniq) -}}
{{- end -}}
{{- end -}}
{{- toYaml $outbound -}}
{{- end -}}

{{/* What a Secret of a component is called. Usage: (list $ "replay" "tls") */}}
{{- define "headrace.secret" -}}
{{- $root := index . 0 -}}
{{- printf "%s-%s-%s" ($root.Values.secrets.prefix | default (include "headrace.fullname" $root)) (index . 1 | replace "_" "-") (index . 2) -}}
{{- end -}}

{{/* The variables that deploy/docker-compose.yml sets too: hosts, ports, and the paths of secrets. */}}
{{- define "headrace.environment" -}}
{{- $ports := include "headrace.ports" . | fromYaml -}}
{{- $settings := dict
  "HOME" "/tmp"
  "HEADRACE_RUN__ID" (.Values.runId | default .Release.Name)
  "HEADRACE_RUN__DIR" "/data/runs"
  "HEADRACE_REPLAY__REDIS_URL" (.Values.redis.url | default (printf "rediss://%s:%v/0?ssl_ca_certs=/run/headrace/ca.pem" (include "headrace.name" (list . "redis")) $ports.redis))
  "HEADRACE_REPLAY__HOST" "0.0.0.0"
  "HEADRACE_REPLAY__PORT" $ports.replay
  "HEADRACE_REWARD__HOST" "0.0.0.0"
  "HEADRACE_REWARD__PORT" $ports.reward
  "HEADRACE_REWARD__HTTP_PORT" (index $ports "reward-http")
  "HEADRACE_REWARD__ADDRESS" (printf "%s:%v" (include "headrace.name" (list . "reward")) $ports.reward)
  "HEADRACE_ROLLOUT__HOST" "0.0.0.0"
  "HEADRACE_ROLLOUT__PORT" $ports.rollout
  "HEADRACE_ROLLOUT__ADVERTISE_HOST" (include "headrace.name" (list . "rollout"))
  "HEADRACE_AGENTS__HOST" "0.0.0.0"
  "HEADRACE_AGENTS__PORT" $ports.agents
  "HEADRACE_AGENTS__HTTP_PORT" (index $ports "agents-http")
  "HEADRACE_AGENTS__ADVERTISED_URL" (printf "https://%s:%v" (include "headrace.name" (list . "agents")) $ports.agents)
  "HEADRACE_TRAINER__HOST" "0.0.0.0"
  "HEADRACE_TRAINER__PORT" $ports.trainer
  "HEADRACE_TRAINER__NUM_PROCESSES" (mul .Values.trainer.nodes .Values.trainer.ranksPerNode)
  "HEADRACE_PAGE__HOST" "0.0.0.0"
  "HEADRACE_PAGE__PORT" $ports.page
  "HEADRACE_SECURITY__TLS_CERT" "/run/headrace/tls.pem"
  "HEADRACE_SECURITY__TLS_KEY" "/run/headrace/tls.key"
  "HEADRACE_SECURITY__TLS_CA" "/run/headrace/ca.pem"
  "HEADRACE_SECURITY__CREDENTIALS" "/run/headrace/credentials" -}}
{{- range .Values.environments -}}
{{- if not .attached -}}
{{- $_ := set $settings (printf "HEADRACE_ENV__%s__TARGET" (upper .name)) (printf "%s:%v" (include "headrace.name" (list $ (printf "environment-%s" .name))) .port) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := merge (deepCopy .Values.env) $settings }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end -}}

{{/* Of services that load models and data sets. */}}
{{- define "headrace.hubEnvironment" -}}
- name: HF_HOME
  value: /data/models/huggingface
- name: VLLM_CACHE_ROOT
  value: /data/cache/vllm
- name: TRITON_CACHE_DIR
  value: /data/cache/triton
- name: TORCHINDUCTOR_CACHE_DIR
  value: /data/cache/inductor
{{- end -}}

{{/* Their variables from Secrets: HF_TOKEN, WANDB_API_KEY, … Usage: (list NAME …), of which some may be empty */}}
{{- define "headrace.variables" -}}
{{- with compact . -}}
envFrom:
{{- range . }}
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end -}}
{{- end -}}

{{/* What every pod has. It can do nothing but its work: no API token, no root, no capability, no writing beside its volumes. */}}
{{- define "headrace.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where a pod may run. Usage: the section of values */}}
{{- define "headrace.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The files of a component under /run/headrace, from its two Secrets. A renewed one replaces its file while the service runs.
Usage: (list $ "replay") */}}
{{- define "headrace.secretFiles" -}}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ include "headrace.secret" (append . "tls") }}
          items:
            - {key: tls.crt, path: tls.pem}
            - {key: tls.key, path: tls.key}
            - {key: ca.crt, path: ca.pem}
      - secret:
          name: {{ include "headrace.secret" (append . "credentials") }}
{{- end -}}

{{/* The volumes of every Headrace service. Usage: (list $ "replay") */}}
{{- define "headrace.volumes" -}}
{{- $root := index . 0 -}}
{{ include "headrace.secretFiles" . }}
- name: config
  configMap:
    name: {{ include "headrace.name" (list $root "config") }}
- name: tmp
  emptyDir: {}
{{- with $root.Values.redis.caSecret }}
- name: redis-ca
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "headrace.mounts" -}}
- {name: secrets, mountPath: /run/headrace, readOnly: true}
- {name: config, mountPath: /etc/headrace, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.redis.caSecret }}
- {name: redis-ca, mountPath: /run/redis-ca, readOnly: true}
{{- end }}
{{- end -}}

{{/* The claim of a volume. Usage: (list $ "runs") */}}
{{- define "headrace.claim" -}}
{{- $given := index (index . 0).Values.storage (index . 1) -}}
{{- $given.existingClaim | default (include "headrace.name" .) -}}
{{- end -}}

{{/* Everything restarts when the configuration changes: each service reads it when it starts. */}}
{{- define "headrace.checksum" -}}
checksum/config: {{ sha256sum .Values.config }}
{{- end -}}

{{/* A service that answers nothing for two minutes is replaced, as `headrace up` does. Usage: (list PORT SECONDS) */}}
{{- define "headrace.probes" -}}
{{- $port := index . 0 -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ $port }}, scheme: HTTPS}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (index . 1) 5 }}
livenessProbe:
  httpGet: {path: /healthz, port: {{ $port }}, scheme: HTTPS}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
readinessProbe:
  exec:
    command: [ready, {{ $port | quote }}]
  periodSeconds: 10
  timeoutSeconds: 5
{{- end -}}

{{/* Drains take one pod of a component at a time. Usage: (list $ "replay") */}}
{{- define "headrace.disruptionBudget" -}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "headrace.name" . }}
  labels:
    {{- include "headrace.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "headrace.selector" . | nindent 6 }}
{{- end -}}

{{/* Makes the demo's model once, where one is asked for. */}}
{{- define "headrace.demoModel" -}}
{{- with .Values.demoModel }}
{{- if .name }}
initContainers:
  - name: model
    image: {{ include "headrace.image" $ }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    command: [make-model, {{ .name | quote }}, {{ .path | quote }}]
    env:
      - {name: HOME, value: /tmp}
      - {name: HF_HUB_OFFLINE, value: "1"}
    securityContext:
      {{- include "headrace.containerSecurity" $ | nindent 6 }}
    resources:
      requests: {cpu: "1", memory: 2Gi}
      limits: {memory: 2Gi}
    volumeMounts:
      - {name: models, mountPath: /data/models}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}
{{- end -}}

{{/* The ports of a policy's rule. All, where the system chooses them. */}}
{{- define "headrace.policyPorts" -}}
{{- if kindIs "slice" . -}}
ports:
  {{- range . }}
  - {port: {{ . }}, protocol: TCP}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Of a container that moves tensors: InfiniBand and RoCE lock memory. Usage: the section of values */}}
{{- define "headrace.gpuSecurity" -}}
{{ include "headrace.containerSecurity" . }}
{{- if .rdma }}
  add: [IPC_LOCK]
{{- end }}
{{- end -}}

{{/* Usage: (list $ SECTION) */}}
{{- define "headrace.gpuResources" -}}
{{- $section := index . 1 -}}
{{- $resources := deepCopy $section.resources -}}
{{- $limits := $resources.limits -}}
{{- if $section.gpus -}}
{{- $_ := set $limits (index . 0).Values.gpuResource $section.gpus -}}
{{- end -}}
{{- range $name, $count := $section.rdma -}}
{{- $_ := set $limits $name $count -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Of services that load models. What they compile is kept for the life of the pod, and workers share memory in /dev/shm. */}}
{{- define "headrace.modelMounts" -}}
- {name: models, mountPath: /data/models}
- {name: cache, mountPath: /data/cache}
- {name: shm, mountPath: /dev/shm}
{{- end -}}

{{/* Usage: (list $ SECTION) */}}
{{- define "headrace.modelVolumes" -}}
- name: models
  persistentVolumeClaim:
    claimName: {{ include "headrace.claim" (list (index . 0) "models") }}
- name: cache
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ (index . 1).shm }}}
{{- end -}}

{{/* The pod of the trainer, one a node. */}}
{{- define "headrace.trainerPod" -}}
{{- $component := list . "trainer" -}}
{{- $ports := include "headrace.ports" . | fromYaml -}}
{{- $nodes := int .Values.trainer.nodes -}}
{{- $ranks := int .Values.trainer.ranksPerNode -}}
{{- $service := include "headrace.name" $component -}}
metadata:
  labels:
    {{- include "headrace.labels" $component | nindent 4 }}
  annotations:
    {{- include "headrace.checksum" . | nindent 4 }}
    # an autoscaler that tidies up would cost the steps since the last checkpoint
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    karpenter.sh/do-not-disrupt: "true"
    {{- with .Values.trainer.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .Values.kueue.topology }}
    kueue.x-k8s.io/podset-required-topology: {{ . }}
    {{- end }}
spec:
  {{- include "headrace.pod" . | nindent 2 }}
  {{- with include "headrace.scheduling" .Values.trainer | trim }}{{ . | nindent 2 }}{{ end }}
  restartPolicy: Never
  subdomain: {{ $service }}
  # it ends its step, and writes a checkpoint
  terminationGracePeriodSeconds: {{ .Values.trainer.terminationGracePeriodSeconds }}
  {{- with include "headrace.demoModel" . }}{{ . | nindent 2 }}{{ end }}
  containers:
    - name: trainer
      image: {{ include "headrace.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- if gt $nodes 1 }}
      # The ranks of all nodes meet at the pod with index 0, which has rank 0. Its name is this one's, with another index.
      command: [bash, -c]
      args:
        - |
          first="${HOSTNAME%-*}-0.{{ $service }}"
          is_host=false; if [ "$JOB_COMPLETION_INDEX" = 0 ]; then is_host=true; fi
          exec python -m headrace_services.trainer.launch {{ $ranks }} --nnodes {{ $nodes }} \
            --rdzv-backend c10d --rdzv-endpoint "$first:{{ $ports.torchrun }}" --rdzv-conf "is_host=$is_host,join_timeout=1800,read_timeout=1800" \
            --shutdown-timeout {{ sub .Values.trainer.terminationGracePeriodSeconds 10 }} \
            -m headrace.cli trainer --config /etc/headrace/run.yaml
      {{- else if gt $ranks 1 }}
      command: [python, -m, headrace_services.trainer.launch, {{ $ranks | quote }}, --shutdown-timeout, {{ sub .Values.trainer.terminationGracePeriodSeconds 10 | quote }}, -m, headrace.cli]
      args: [trainer, --config, /etc/headrace/run.yaml]
      {{- else }}
      args: [trainer, --config, /etc/headrace/run.yaml]
      {{- end }}
      env:
        {{- include "headrace.environment" . | trim | nindent 8 }}
        {{- include "headrace.hubEnvironment" . | nindent 8 }}
        {{- if .Values.trainer.gpus }}
        - {name: HEADRACE_TRAINER__DEVICE, value: cuda}
        {{- end }}
      {{- with include "headrace.variables" (list .Values.secrets.variables .Values.secrets.store) }}{{ . | nindent 6 }}{{ end }}
      ports:
        - {name: https, containerPort: {{ $ports.trainer }}}
        {{- if gt $nodes 1 }}
        - {name: torchrun, containerPort: {{ $ports.torchrun }}}
        {{- end }}
      securityContext:
        {{- include "headrace.gpuSecurity" .Values.trainer | nindent 8 }}
      resources:
        {{- include "headrace.gpuResources" (list . .Values.trainer) | nindent 8 }}
      # Only rank 0 listens, which is in the pod with index 0.
      startupProbe:
        exec:
          command: [sh, -c, 'test "$JOB_COMPLETION_INDEX" != 0 || exec ready {{ $ports.trainer }} /healthz']
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ div .Values.trainer.startupSeconds 10 }}
      livenessProbe:
        exec:
          command: [sh, -c, 'test "$JOB_COMPLETION_INDEX" != 0 || exec ready {{ $ports.trainer }} /healthz']
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 12
      readinessProbe:
        exec:
          command: [sh, -c, 'test "$JOB_COMPLETION_INDEX" != 0 || exec ready {{ $ports.trainer }}']
        periodSeconds: 10
        timeoutSeconds: 5
      volumeMounts:
        {{- include "headrace.mounts" . | nindent 8 }}
        {{- include "headrace.modelMounts" . | nindent 8 }}
        - {name: runs, mountPath: /data/runs}
  volumes:
    {{- include "headrace.volumes" $component | nindent 4 }}
    {{- include "headrace.modelVolumes" (list . .Values.trainer) | nindent 4 }}
    - name: runs
      persistentVolumeClaim:
        claimName: {{ include "headrace.claim" (list . "runs") }}
{{- end -}}

{{/* The components that have secrets, as YAML: all that listen or call. */}}
{{- define "headrace.secretive" -}}
{{- $names := keys (include "headrace.arrows" . | fromYaml) -}}
{{- if not .Values.redis.url -}}
{{- $names = append $names "redis" -}}
{{- end -}}
components:
  {{- range $names | sortAlpha }}
  - {{ . }}
  {{- end }}
{{- end -}}

{{/* Of objects that are there before the others. */}}
{{- define "headrace.hook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
