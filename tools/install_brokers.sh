#!/usr/bin/env bash
# Puts what the embedded install starts (redis-server, nats-server) and what the lab needs (iproute2, iperf3) on this
# machine where it is missing: by apt on Debian and Ubuntu, by Homebrew on a Mac.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"

missing=()
need() { # PROGRAM DEBIAN_PACKAGE BREW_PACKAGE
    command -v "$1" >/dev/null || missing+=("$1:$2:$3")
}
need redis-server redis-server redis
need nats-server nats-server nats-server
if [ "$(uname)" = Linux ]; then
    need ip iproute2 -
    need iperf3 iperf3 -
fi
[ ${#missing[@]} -eq 0 ] && exit 0

programs="${missing[*]%%:*}"
if command -v apt-get >/dev/null; then
    sudo=""
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || { echo "setup: $programs missing; install as root: apt-get install redis-server nats-server iproute2 iperf3" >&2; exit 1; }
        sudo=sudo
    fi
    packages=()
    for entry in "${missing[@]}"; do packages+=("$(cut -d: -f2 <<<"$entry")"); done
    echo "setup: installing ${packages[*]}"
    $sudo apt-get update -qq
    # The packages' own system services are not wanted: the platform starts its own children.
    policy=/usr/sbin/policy-rc.d
    made_policy=""
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' | $sudo tee "$policy" >/dev/null
        $sudo chmod +x "$policy"
        made_policy=yes
    fi
    trap '[ -z "$made_policy" ] || $sudo rm -f "$policy"' EXIT
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
elif command -v brew >/dev/null; then
    for entry in "${missing[@]}"; do
        package="$(cut -d: -f3 <<<"$entry")"
        [ "$package" = - ] || brew install --quiet "$package"
    done
else
    echo "setup: $programs missing, and neither apt-get nor brew is here: install redis-server and nats-server by hand," >&2
    echo "       or point TORCHRELAY_REDIS_URL and TORCHRELAY_NATS_URL at running ones" >&2
    exit 1
fi
