#!/usr/bin/env bash
# Installs what the end-to-end tests talk to besides Python packages: Debian's prometheus (with promtool) and chromium,
# and the openai package of npm. What cannot be installed is named, and the tests that need it are skipped with that
# reason.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"

say() { printf 'peers: %s\n' "$*"; }

# Without recommended packages and without starting a service that Debian would enable.
install_package() {
    local name="$1" log="${TMPDIR:-/tmp}/quire-peers-apt.log"
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "$name is not installed and this user cannot install it; its tests will be skipped"
    elif { apt-get install -y --no-install-recommends "$name" || { apt-get update && apt-get install -y --no-install-recommends "$name"; }; } \
        >"$log" 2>&1; then
        say "installed $name"
    else
        say "could not install $name (see $log); its tests will be skipped"
    fi
}

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
    say "prometheus is there"
else
    install_package prometheus
fi

if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then
    say "a Chromium is there"
else
    install_package chromium
fi

if [ -d "$here/node_modules/openai" ]; then
    say "the openai npm package is there"
elif command -v npm >/dev/null; then
    if npm install --prefix "$here" --no-save --no-package-lock --no-audit --no-fund --loglevel=error openai \
        >"${TMPDIR:-/tmp}/quire-peers-npm.log" 2>&1; then
        say "installed the openai npm package"
    else
        say "could not install the openai npm package (see ${TMPDIR:-/tmp}/quire-peers-npm.log); its tests will be skipped"
    fi
else
    say "npm is not installed; the tests of the openai npm package will be skipped"
fi
exit 0
