#!/usr/bin/env bash
# The demo on a cluster that kind makes in Docker, on a CPU. From a checkout:
#
#   deploy/helm/kind_demo.sh           # up: builds the image, makes the cluster, installs the chart, and follows the trainer
#   deploy/helm/kind_demo.sh page      # the address of the run's page, for as long as this runs
#   deploy/helm/kind_demo.sh down      # takes the cluster down, with the run
#
# It needs docker, kind, kubectl, helm, and headrace (`make setup`); 8 GiB of memory and 20 GB of disk for Docker.
set -euo pipefail
cd "$(dirname "$0")/../.."

cluster=${CLUSTER:-headrace}
config=${CONFIG:-examples/arithmetic_tiny.yaml}
headrace=${HEADRACE:-.venv/bin/headrace}
image=headrace:0.1.0
context=(--context "kind-$cluster" --namespace headrace)

up() {
  docker build -f deploy/Dockerfile --build-arg TORCH_INDEX="${TORCH_INDEX-https://download.pytorch.org/whl/cpu}" -t "$image" .
  # kind's own network plugin has had network policies since 0.24
  kind get clusters | grep -qx "$cluster" || kind create cluster --name "$cluster" --wait 120s
  kind load docker-image "$image" --name "$cluster"
  values=$(mktemp -d)
  trap 'rm -r "$values"' EXIT
  "$headrace" deploy helm "$config" -o "$values/run.yaml"
  # one node, whose storage class gives a volume to one node at a time
  helm --kube-context "kind-$cluster" --namespace headrace upgrade --install demo deploy/helm/headrace --create-namespace --timeout 15m \
    --values "$values/run.yaml" \
    --set storage.runs.accessMode=ReadWriteOnce --set storage.runs.size=2Gi \
    --set storage.models.accessMode=ReadWriteOnce --set storage.models.size=2Gi --set redis.storage.size=1Gi
  local trainer=(--selector app.kubernetes.io/component=trainer)
  until kubectl "${context[@]}" get pods "${trainer[@]}" --output name | grep -q .; do sleep 2; done
  # the model is made first
  kubectl "${context[@]}" wait pods "${trainer[@]}" --for=condition=Ready --timeout=1800s
  kubectl "${context[@]}" logs --follow "${trainer[@]}" --container trainer --tail=-1
}

page() {
  kubectl "${context[@]}" exec deployment/demo-page -- headrace page demo
  kubectl "${context[@]}" port-forward deployment/demo-page 8396
}

down() {
  kind delete cluster --name "$cluster"
}

"${1:-up}"
