"""A bash script for a `ClusterJob` over plain SSH: one agent per host, with local output; if one fails, all stop."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from accel_scale.cluster.job import ClusterJob
from accel_scale.errors import ConfigError

_HOST = re.compile(r"([A-Za-z0-9_][\w.+-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:-]*")


@dataclass(frozen=True)
class SshOptions:
    """Options for reaching the hosts.

    Attributes:
        hosts: One per node; agents meet at the first, whose address all others must be able to reach.
        port: Rendezvous port on the first host.
        node_restarts: How often a failed or killed agent is restarted before all are stopped.
        save_seconds: Time that workers may take to save when asked to stop.
    """

    hosts: Sequence[str]
    port: int = 29500
    node_restarts: int = 1
    save_seconds: int = 120


def ssh_script(job: ClusterJob, options: SshOptions) -> str:
    """The text of the script.

    Raises:
        ConfigError: if the number of hosts differs from the number of nodes, or a host is invalid or named twice.
    """
    hosts = [_checked_host(host) for host in options.hosts]
    if len(hosts) != job.num_nodes:
        raise ConfigError(
            f"{len(hosts)} hosts are named for {job.num_nodes} nodes.",
            place="--hosts",
            fix="name one host per node, separated by commas.",
        )
    double = next((host for host in hosts if hosts.count(host) > 1), None)
    if double is not None:
        raise ConfigError(f"{double} is named twice.", place="--hosts", fix="name every host once.")
    if not 0 < options.port < 65536:
        raise ConfigError(f"{options.port} is not a port.", place="--port", fix="use one between 1 and 65535.")
    agent = job.agent_command(rank="NODE_RANK", address="HEAD_NODE", port="HEAD_PORT")
    environment = " ".join(f"{name}={value}" for name, value in job.environment.items())
    lines = [
        "#!/usr/bin/env bash",
        f"# Written by accel-scale launch-script: {job.about}.",
        "# Needs bash 4.3 here and bash on the hosts, and logins without a password. SSH= names another transport: it",
        "# is called with a host and a command line. Ctrl-C, or the end of this script for whatever reason, asks all",
        "# agents to save and stop.",
        "# shellcheck disable=SC1091,SC2016,SC2329 # files of the hosts, variables of theirs, functions of traps",
        "set -uo pipefail",
        f"HOSTS=({' '.join(hosts)})",
        f"HEAD_NODE={hosts[0].rpartition('@')[2]}",
        f"HEAD_PORT=${{HEAD_PORT:-{options.port}}}",
        f"NODE_RESTARTS={options.node_restarts}",
        f"SAVE_SECONDS={options.save_seconds}",
        "SSH=${SSH:-ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=4}",
        f"SETUP={shlex.quote(' && '.join(job.setup_lines()) or ':')}",
        f"AGENT={shlex.quote(agent)}",
        _BODY.replace("@ENVIRONMENT@", environment),
    ]
    return "\n".join(lines)


def _checked_host(host: str) -> str:
    """Return `host` if it is valid and cannot be mistaken for an ssh option."""
    if not _HOST.fullmatch(host):
        raise ConfigError(
            f"{host!r} is not a host.", place="--hosts", fix="name hosts like node1, user@node1 or 10.0.0.1."
        )
    return host


# The shell on a host watches its standard input, to which nobody writes. It closes when this script ends or the
# connection is lost, and the agent is then asked to stop. Only this script holds the pipe's writing end.
_BODY = r"""
read -r -d '' REMOTE <<'END_OF_REMOTE' || true
exec 3<&0
export HEAD_NODE HEAD_PORT NODE_RANK
export @ENVIRONMENT@ TORCH_ELASTIC_SHUTDOWN_TIMEOUT="$SAVE_SECONDS"
eval "$SETUP" || exit 1
eval "exec $AGENT" </dev/null 3<&- &
agent=$!
{ read -r _; kill -TERM "$agent"; } <&3 >/dev/null 2>&1 &
watcher=$!
wait "$agent"
status=$?
kill "$watcher" 2>/dev/null
exit "$status"
END_OF_REMOTE

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
mkfifo "$work/alive"
exec {alive}<>"$work/alive"

start_node() {
  local rank=$1 host=${HOSTS[$1]} payload
  payload=$(
    printf '%s=%q\n' HEAD_NODE "$HEAD_NODE" HEAD_PORT "$HEAD_PORT" NODE_RANK "$rank" \
      SAVE_SECONDS "$SAVE_SECONDS" SETUP "$SETUP" AGENT "$AGENT"
    printf '%s\n' "$REMOTE"
  )
  payload=$(printf '%s' "$payload" | base64 | tr -d '\n')
  (
    exec {alive}>&-
    trap '' INT HUP
    # shellcheck disable=SC2086 # SSH is a command with its options
    $SSH "$host" "bash -c 'eval \"\$(echo $payload | base64 -d)\"'" <"$work/alive" 2>&1 | sed -u "s/^/[$host] /"
    echo "${PIPESTATUS[0]}" >"$work/$rank.part"
    mv "$work/$rank.part" "$work/$rank.done"
  ) &
}

stopping=0
first=0
stop_all() {
  stopping=1
  if [ -n "${alive:-}" ]; then exec {alive}>&-; fi
  alive=
}
on_signal() {
  echo "asking all agents to save and stop" >&2
  if ((first == 0)); then first=130; fi
  stop_all
}
trap on_signal INT TERM HUP

restarts=()
running=${#HOSTS[@]}
for rank in "${!HOSTS[@]}"; do
  restarts[rank]=$NODE_RESTARTS
  start_node "$rank"
done
while ((running > 0)); do
  wait -n
  if (($? == 127)) && ! compgen -G "$work/*.done" >/dev/null; then exit 1; fi
  for rank in "${!HOSTS[@]}"; do
    if [ ! -e "$work/$rank.done" ]; then continue; fi
    status=$(cat "$work/$rank.done")
    rm "$work/$rank.done"
    if ((status == 0)); then
      running=$((running - 1))
    elif ((!stopping && restarts[rank] > 0)); then
      restarts[rank]=$((restarts[rank] - 1))
      echo "[${HOSTS[rank]}] ended with status $status: starting it again" >&2
      start_node "$rank"
    else
      running=$((running - 1))
      if ((first == 0)); then first=$status; fi
      if ((!stopping)); then
        echo "[${HOSTS[rank]}] ended with status $status: stopping all" >&2
        stop_all
      fi
    fi
  done
done
exit "$first"
"""
