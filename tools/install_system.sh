#!/usr/bin/env bash
# Installs what is missing of the embedded install's servers (redis-server, nats-server) and a compiler for the engine's kernels:
# with apt on Debian and Ubuntu, with Homebrew on macOS. With the argument "tests" also what tests need (PostgreSQL; Prometheus;
# iproute2 and iperf3 for the lab; Slurm; Chromium). Fails only when a server of the embedded install cannot be installed.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin:/usr/local/sbin"

brokers=()
extra=()
[ -n "${TORCHRELAY_REDIS_URL-}" ] || command -v redis-server >/dev/null || brokers+=(redis-server)
[ -n "${TORCHRELAY_NATS_URL-}" ] || command -v nats-server >/dev/null || brokers+=(nats-server)
if [ "$(uname) $(uname -m)" = "Linux x86_64" ]; then
    command -v gcc >/dev/null || extra+=(gcc libc6-dev)
fi
if [ "${1-}" = tests ]; then
    command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || extra+=(postgresql)
    { command -v prometheus && command -v promtool; } >/dev/null || extra+=(prometheus)
    if [ "$(uname)" = Linux ]; then
        command -v ip >/dev/null || extra+=(iproute2)
        command -v iperf3 >/dev/null || extra+=(iperf3)
        command -v slurmctld >/dev/null || extra+=(slurm-wlm)
        command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || extra+=(chromium)
    fi
fi
[ ${#brokers[@]} -eq 0 ] && [ ${#extra[@]} -eq 0 ] && exit 0

give_up() { # WHY
    if [ ${#brokers[@]} -eq 0 ]; then
        echo "setup: without ${extra[*]} tests cannot run, or the engine has no kernels ($1)" >&2
        exit 0
    fi
    echo "setup: ${brokers[*]} missing, and $1: install them by hand," >&2
    echo "       or point TORCHRELAY_REDIS_URL and TORCHRELAY_NATS_URL at running ones" >&2
    exit 1
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
    echo "setup: installing ${brokers[*]-} ${extra[*]-}"
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
    ! apt-cache show chromium-headless-shell >/dev/null 2>&1 || extra=(${extra[@]+"${extra[@]/%chromium/chromium-headless-shell}"})
    apt install -y --no-install-recommends ${brokers[@]+"${brokers[@]}"} ${extra[@]+"${extra[@]}"} || give_up "apt-get install failed"
elif command -v brew >/dev/null; then
    packages=(${brokers[@]+"${brokers[@]/redis-server/redis}"} ${extra[@]+"${extra[@]/#postgresql/postgresql@15}"})
    brew install --quiet "${packages[@]}"
else
    give_up "neither apt-get nor brew is available"
fi
