#!/bin/sh
# Brings Chromium, which the tests of `areal-async view` drive, and a font for it: nothing if it shows a page, else
# installs it where it may (Debian and its kin, as root). Where that can't be it says so and what to do; it fails in CI
# alone, since elsewhere the tests that need it are left out.
set -eu
SHOW_S=120 # as long as a page may take; a second where nothing else runs

found() {
    command -v chromium || command -v chromium-browser || command -v google-chrome
}

works() {
    said="no chromium was found"
    browser=$(found) || return 1
    profile=$(mktemp -d)
    shown=$(timeout $SHOW_S "$browser" --headless --no-sandbox --disable-gpu --no-first-run --disable-dev-shm-usage \
        --disable-background-networking --disable-component-update --disable-sync --user-data-dir="$profile" \
        --dump-dom 'data:text/html,<p>a page</p>' 2>"$profile/said") || true
    said=$(grep -v '^$' "$profile/said" | tail -n 1)
    rm -rf "$profile" 2>/dev/null || true # a process of it may be leaving, and write there
    case "$shown" in *"<p>a page</p>"*) ;; *) return 1 ;; esac
    said="there is no font"
    [ -n "$(fc-list 2>/dev/null)" ] # without one it shows pages without a letter
}

if works || { "$(dirname "$0")/install_packages.sh" chromium fontconfig fonts-dejavu-core && works; }; then
    exit 0
fi
{
    echo "Chromium and a font are needed to test the pages of areal-async view, and don't work here: ${said:-it said nothing}"
    echo "As root, one of:"
    echo "  apt-get install chromium fontconfig fonts-dejavu-core      Debian"
    echo "  dnf install chromium fontconfig dejavu-sans-fonts          Fedora"
    echo "  pacman -S chromium fontconfig ttf-dejavu                   Arch"
} >&2
[ -z "${CI:-}" ] || exit 1
echo "The tests that need them are left out, since this isn't CI." >&2
