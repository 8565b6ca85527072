
# --- The same in every job: the machines, their secrets, and the services -------------------------------------------------------------------

secrets=$run_folder/secrets logs=$run_folder/logs
mkdir -p "$secrets" "$logs" "$run_folder/redis"
chmod 700 "$secrets"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# In place of its shell, which would keep a signal to itself.
on() { exec srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[$1]}" "${@:2}"; }

# The address by which another node reaches this one, and its interface: its own name may be 127.0.1.1 there.
# shellcheck disable=SC2016  # the node's shell expands it
route='ip -4 -o route get "$(getent ahostsv4 "$1" | sed -n "1s/ .*//p")" | sed -n "s/.* dev \([^ ]*\).* src \([^ ]*\).*/\2 \1/p"'
addresses=() interfaces=()
for node in "${!nodes[@]}"; do
  read -r "addresses[node]" "interfaces[node]" < <(on "$node" sh -c "$route" sh "${nodes[node == 0 ? 1 : 0]}") ||
    { echo "error: ${nodes[node]} finds no route to the other nodes" >&2; exit 1; }
done
first=${addresses[0]}

# Existing tokens and the authority are kept, so that a job goes on where the one before it ended.
"$bin/headrace" certs --dir "$secrets" "${addresses[@]}"
"$bin/headrace" credentials "$config" "${overrides[@]}" --dir "$secrets"
"$bin/headrace" acl "$config" "${overrides[@]}" --own-server --credentials "$secrets/credentials" > "$secrets/users.acl"

export HEADRACE_REPLAY__REDIS_URL="rediss://$first:$redis_port/0?ssl_ca_certs=$in_url/secrets/ca.pem"
export HEADRACE_REPLAY__HOST=0.0.0.0 HEADRACE_REWARD__HOST=0.0.0.0 HEADRACE_ROLLOUT__HOST=0.0.0.0
export HEADRACE_AGENTS__HOST=0.0.0.0 HEADRACE_TRAINER__HOST=0.0.0.0
export HEADRACE_REWARD__ADDRESS="$first:$reward_port" HEADRACE_SECURITY__TLS_CA="$secrets/ca.pem"

# as SERVICE NODE COMMAND…: COMMAND on that node, with the node's certificate and the service's tokens.
as() {
  export HEADRACE_SECURITY__TLS_CERT="$secrets/${addresses[$2]}.pem" HEADRACE_SECURITY__TLS_KEY="$secrets/${addresses[$2]}.key"
  export HEADRACE_SECURITY__CREDENTIALS="$secrets/$1.credentials"
  export HEADRACE_ROLLOUT__ADVERTISE_HOST="${addresses[$2]}" HEADRACE_AGENTS__ADVERTISED_URL="https://${addresses[$2]}:$agents_port"
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-${interfaces[$2]}}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-${interfaces[$2]}}"
  on "$2" "${@:3}"
}

starts_again() { (($1 == 70 || $1 == 75 || $1 > 128)); }  # what died, not what ended with an error for you

# keep NAME SERVICE NODE COMMAND…: runs until the job ends. What dies is started again; an error that only you can correct ends the job.
keep() {
  local code
  while :; do
    code=0
    (as "${@:2}") >> "$logs/$1.log" 2>&1 || code=$?
    starts_again "$code" || break
    echo "$1 ended with $code and is started again ($logs/$1.log)" >&2
    sleep 5
  done
  ((code == 0)) || { echo "error: $1 ended with $code:" >&2; tail -n 5 "$logs/$1.log" >&2; kill -USR1 $$; }
}

redis=(--port 0 --tls-port "$redis_port" --tls-auth-clients no --tls-ca-cert-file "$secrets/ca.pem" --tls-cert-file "$secrets/$first.pem"
  --tls-key-file "$secrets/$first.key" --aclfile "$secrets/users.acl" --dir "$run_folder/redis" --appendonly yes --appendfsync everysec)
keep redis redis 0 redis-server "${redis[@]}" &
keep replay replay 0 "$bin/headrace" replay --config "$config" "${overrides[@]}" &
keep reward reward 0 "$bin/headrace" reward --config "$config" "${overrides[@]}" "reward.port=$reward_port" &
# only a run with episodes has runners
[[ ! -e $secrets/agents.credentials ]] ||
  keep agents agents 0 "$bin/headrace" agents --config "$config" "${overrides[@]}" "agents.port=$agents_port" &
replica=0
for node in "${!nodes[@]}"; do
  for own in ${replicas[node]}; do
    visible=() replica=$((replica + 1))
    [[ $own == cpu ]] || visible=(env CUDA_VISIBLE_DEVICES="$own")
    keep "rollout-$replica" rollout "$node" "${visible[@]}" "$bin/headrace" rollout --config "$config" "${overrides[@]}" &
  done
done

# --- The trainer, on as many nodes as it has ranks on ---------------------------------------------------------------------------------------

trainers=() stopped=0 failed=0
# srun hands SIGUSR1 on, by which the ranks save a checkpoint. At SIGTERM it kills them.
tell() { ((${#trainers[@]} == 0)) || kill -s "$1" "${trainers[@]}" 2> /dev/null || :; }
trap 'stopped=1; tell USR1' TERM            # the job's time ends
trap 'stopped=1 failed=1; tell USR1' USR1   # a service has ended with an error

# The exit code of a background process, however many signals this shell gets meanwhile.
await() {
  while kill -0 "$1" 2> /dev/null; do wait "$1" || :; done
  wait "$1"
}

# All ranks once. The exit code is that of the first node that ended: the others end because of it, or are ended.
train() {
  local node code=0 visible meet
  trainers=()
  for node in "${!nodes[@]}"; do
    ((ranks[node])) || continue
    visible=() meet=()
    [[ ${trainer_devices[node]} == cpu ]] || visible=(env CUDA_VISIBLE_DEVICES="${trainer_devices[node]}")
    ((trainer_nodes == 1)) || meet=(--nnodes "$trainer_nodes" --rdzv-backend c10d --rdzv-endpoint "$first:$rendezvous_port"
      --rdzv-id "$SLURM_JOB_ID-$1" --rdzv-conf "is_host=$((node == 0))" --local-addr "${addresses[node]}")
    (as trainer "$node" "${visible[@]}" "$bin/python" -m headrace_services.trainer.launch "${ranks[node]}" "${meet[@]}" \
      -m headrace.cli trainer --config "$config" "${overrides[@]}") >> "$logs/trainer-$node.log" 2>&1 &
    trainers+=($!)
  done
  while :; do
    wait -n "${trainers[@]}" || :
    for node in "${trainers[@]}"; do kill -0 "$node" 2> /dev/null || break 2; done   # else it was a signal to this shell
  done
  await "$node" || code=$?
  # ranks that wait for one that died would do so until their own deadlines
  { sleep 60; ((stopped)) || tell USR1; sleep 60; ((stopped)) || tell TERM; } &
  local ender=$!
  for node in "${trainers[@]}"; do await "$node" || ((code)) || code=$?; done
  kill "$ender" 2> /dev/null || :
  return "$code"
}

for attempt in {1..10}; do
  code=0
  train "$attempt" || code=$?
  if ((stopped)) || ! starts_again "$code"; then break; fi
  echo "the trainer ended with $code and continues from its checkpoint ($logs/trainer-0.log)" >&2
done
((failed)) && exit 1
((code == 0 || code == 143)) || { echo "error: the trainer ended with $code:" >&2; tail -n 15 "$logs/trainer-0.log" >&2; }
exit "$code"   # Slurm ends what still runs: the replicas, the services, and at last the buffer's server
