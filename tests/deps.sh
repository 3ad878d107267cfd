#!/bin/sh
# Installs what is missing to build (or to lint), on Debian and its kin: names each package before it is installed, and
# uses sudo when not root. Does nothing where everything is there.
set -eu
msrv=89 # Rust 1.89, from Cargo.toml

want=""
need() { # command, package
    command -v "$1" >/dev/null 2>&1 || want="$want $2"
}

need cc gcc
[ -e /usr/include/stdlib.h ] || want="$want libc6-dev"
minor=$( (rustc --version 2>/dev/null || true) | sed -n 's/^rustc 1\.\([0-9]*\).*/\1/p')
if [ "${minor:-0}" -lt "$msrv" ] || ! command -v cargo >/dev/null 2>&1; then
    # Debian 12 carries a current toolchain under these names.
    want="$want rustc-web cargo-web"
fi
if [ "${1:-build}" = lint ]; then
    cargo fmt --version >/dev/null 2>&1 || want="$want rustfmt-web"
    cargo clippy --version >/dev/null 2>&1 || want="$want rust-web-clippy"
fi
[ -n "$want" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "missing:$want. This script knows Debian's packages only: install a C compiler and Rust 1.$msrv or newer." >&2
    exit 1
fi
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo"
echo "installing from Debian:$want"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -q
# shellcheck disable=SC2086 # a list of names
$sudo apt-get install -q -y --no-install-recommends $want ca-certificates
