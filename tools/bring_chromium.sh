#!/bin/sh
# Brings Chromium, which the tests of `areal-async view` drive, and a font for it: nothing if it shows a page, else
# installs it where it may (Debian and its kin, as root), else says what to do and fails.
set -eu

found() {
    command -v chromium || command -v chromium-browser || command -v google-chrome
}

works() {
    browser=$(found) || return 1
    profile=$(mktemp -d)
    shown=$("$browser" --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
        --disable-component-update --disable-sync --user-data-dir="$profile" \
        --dump-dom 'data:text/html,<p>a page</p>' 2>"$profile/said") || true
    said=$(tail -n 3 "$profile/said")
    rm -rf "$profile"
    case "$shown" in *"<p>a page</p>"*) ;; *) return 1 ;; esac
    [ -n "$(fc-list 2>/dev/null)" ]  # without a font it shows pages without a letter
}

if works; then
    exit 0
fi
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    echo "installing chromium with apt-get"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq -o APT::Sandbox::User=root update  # containers may not let it become another user
    apt-get -qq -o APT::Sandbox::User=root install --yes --no-install-recommends chromium fontconfig fonts-dejavu-core >/dev/null
else
    echo "The tests need Chromium and a font, and one of them isn't there or doesn't work. As root, one of:" >&2
    echo "  apt-get install chromium fontconfig fonts-dejavu-core      Debian" >&2
    echo "  dnf install chromium fontconfig dejavu-sans-fonts          Fedora" >&2
    echo "  pacman -S chromium fontconfig ttf-dejavu                   Arch" >&2
    exit 1
fi
if ! works; then
    echo "chromium is installed, and shows no page here; the end of what it said:" >&2
    echo "${said-it was not found}" >&2
    exit 1
fi
