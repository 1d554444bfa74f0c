#!/bin/sh
# Brings bubblewrap, which the tests of rewards need: nothing if it works, else installs it where it may (Debian and
# its kin, as root), else says what to do and fails.
set -eu

works() {
    bwrap --unshare-all --unshare-user --disable-userns --ro-bind / / true 2>/dev/null
}

if works; then
    exit 0
fi
if ! command -v bwrap >/dev/null; then
    if ! "$(dirname "$0")/install_packages.sh" bubblewrap; then
        echo "The tests need bubblewrap (\`bwrap\`, 0.8.0 or newer), and it isn't installed. As root, one of:" >&2
        echo "  apt-get install bubblewrap     Debian 12, Ubuntu 24.04 and newer" >&2
        echo "  dnf install bubblewrap         Fedora" >&2
        echo "  pacman -S bubblewrap           Arch" >&2
        exit 1
    fi
fi
if ! works; then
    echo "bubblewrap is installed, and doesn't work here:" >&2
    bwrap --unshare-all --unshare-user --disable-userns --ro-bind / / true >&2 || true
    echo "Namespaces must be allowed: in a container --privileged, else these settings of the kernel:" >&2
    echo "  sysctl -w kernel.unprivileged_userns_clone=1" >&2
    echo "  sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" >&2
    exit 1
fi
