#!/bin/sh
# Installs Debian packages, for the other scripts here: install_packages.sh PACKAGE…
# Waits for others that use apt, and for a slow network, neither of them for ever. 0: they are installed; 1: they aren't,
# and one line says why.
set -eu
LOCK_TRIES=60 # every 5 s: five minutes
TRY_S=5
FETCH_S=30    # without a byte
WHOLE_S=1200  # of one call, whatever it does

if ! command -v apt-get >/dev/null; then
    echo "$* can't be installed from here: there is no apt-get" >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "$* can't be installed from here: only root may" >&2
    exit 1
fi

# what it said stands in $said
apt() {
    left=$LOCK_TRIES
    while :; do
        code=0
        # its user may not be there in a container
        said=$(LC_ALL=C DEBIAN_FRONTEND=noninteractive timeout $WHOLE_S apt-get -qq -o APT::Sandbox::User=root \
            -o Acquire::Retries=2 -o Acquire::http::Timeout=$FETCH_S -o Acquire::https::Timeout=$FETCH_S "$@" 2>&1) || code=$?
        [ $code -ne 0 ] || return 0
        case "$said" in *"Could not get lock"* | *"Unable to lock"* | *"Unable to acquire"*) ;; *) return $code ;; esac
        [ $left -eq $LOCK_TRIES ] && echo "another program uses apt; waiting for it" >&2
        left=$((left - 1))
        [ $left -gt 0 ] || return $code
        sleep $TRY_S
    done
}

why() {
    case "$1" in
    124) echo "it took longer than $WHOLE_S s" ;;
    *) printf '%s\n' "$said" | grep '^E:' | head -n 1 || echo "exit code $1" ;;
    esac
}

echo "installing with apt-get: $*"
outdated=
apt update || outdated="; before that apt-get update: $(why $?)" # what is known of old may do
apt install --yes --no-install-recommends "$@" || {
    echo "$* can't be installed: apt-get install: $(why $?)$outdated" >&2
    exit 1
}
