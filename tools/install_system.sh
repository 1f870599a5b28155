#!/usr/bin/env bash
# Installs what is missing of the programs that tests need, with apt on Debian and Ubuntu and with Homebrew on macOS: a compiler
# for the engine's kernels, PostgreSQL, Redis with its client, HAProxy, Prometheus; on Linux iproute2 and iperf3 for the lab, Slurm and Chromium.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin:/usr/local/sbin"

missing=()
command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || missing+=(postgresql)
command -v haproxy >/dev/null || missing+=(haproxy)
{ command -v redis-server && command -v redis-cli; } >/dev/null || missing+=(redis) # the commands of compose
{ command -v prometheus && command -v promtool; } >/dev/null || missing+=(prometheus)
if [ "$(uname)" = Linux ]; then
    command -v gcc >/dev/null || missing+=(gcc libc6-dev)
    command -v ip >/dev/null || missing+=(iproute2)
    command -v iperf3 >/dev/null || missing+=(iperf3)
    command -v slurmctld >/dev/null || missing+=(slurm-wlm)
    command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || missing+=(chromium)
fi
[ ${#missing[@]} -eq 0 ] && exit 0

give_up() { # WHY
    echo "tests: ${missing[*]} missing, and $1; tests that need them fail" >&2
    exit 0
}

if command -v apt-get >/dev/null; then
    sudo=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || give_up "apt-get needs root"
        sudo=(sudo)
        # Without a terminal nobody can type a password.
        [ -t 0 ] || sudo=(sudo -n)
        "${sudo[@]}" true || give_up "apt-get needs root"
    fi
    echo "tests: installing ${missing[*]}"
    # Keep the packages from starting system services: the platform starts its own children.
    policy=/usr/sbin/policy-rc.d
    made_policy=""
    trap '[ -z "$made_policy" ] || "${sudo[@]}" rm -f "$policy"' EXIT
    if [ ! -e "$policy" ]; then
        made_policy=yes
        printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" tee "$policy" >/dev/null
        "${sudo[@]}" chmod +x "$policy"
    fi
    apt() { # another apt may hold the lock on a machine that has just booted
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq "$@" >/dev/null
    }
    apt update || give_up "apt-get update failed"
    # Debian also has Chromium without a window, which draws pages with half the CPU.
    ! apt-cache show chromium-headless-shell >/dev/null 2>&1 || missing=("${missing[@]/%chromium/chromium-headless-shell}")
    apt install -y --no-install-recommends "${missing[@]}" || give_up "apt-get install failed"
elif command -v brew >/dev/null; then
    brew install --quiet "${missing[@]/#postgresql/postgresql@15}"
else
    give_up "neither apt-get nor brew is available"
fi
