#!/bin/sh
# Installs what is missing to build, to lint, to build for boards, or to test that (build|lint|board|arm), on Debian and
# its kin: names each package before it is installed, and uses sudo when not root. Does nothing where everything is there.
set -eu
msrv=89 # Rust 1.89, from Cargo.toml

want=""
need() { # command, package
    command -v "$1" >/dev/null 2>&1 || want="$want $2"
}

need cc gcc
[ -e /usr/include/stdlib.h ] || want="$want libc6-dev"
rust_minor() { (rustc --version 2>/dev/null || true) | sed -n 's/^rustc 1\.\([0-9]*\).*/\1/p'; }
minor=$(rust_minor)
if [ "${minor:-0}" -lt "$msrv" ] || ! command -v cargo >/dev/null 2>&1; then
    # Debian 12 carries a current toolchain under these names.
    want="$want rustc-web cargo-web"
fi
if [ "${1:-build}" = lint ]; then
    cargo fmt --version >/dev/null 2>&1 || want="$want rustfmt-web"
    cargo clippy --version >/dev/null 2>&1 || want="$want rust-web-clippy"
fi
mode=${1:-build}
if [ "$mode" = board ] || [ "$mode" = arm ]; then
    need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu
    [ -e /usr/aarch64-linux-gnu/lib/libc.a ] || [ -e /usr/lib/aarch64-linux-gnu/libc.a ] ||
        want="$want libc6-dev-arm64-cross"
    target=aarch64-unknown-linux-gnu
    std() { [ -d "$("$1" --print target-libdir --target $target 2>/dev/null)" ]; }
    # rustup's toolchain after `rustup target add`, or Debian's.
    if ! std rustc && ! std /usr/bin/rustc; then
        foreign=arm64
        want="$want rustc-web libstd-rust-web-dev:arm64"
    fi
    [ "$mode" = board ] || need qemu-aarch64-static qemu-user-static
fi
[ -n "$want" ] || exit 0
[ -e /etc/ssl/certs/ca-certificates.crt ] || want="$want ca-certificates"

if ! command -v apt-get >/dev/null 2>&1; then
    echo "missing:$want. This script knows Debian's packages only: install a C compiler and Rust 1.$msrv or newer." >&2
    exit 1
fi
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo"
echo "installing from Debian:$want"
[ -z "${foreign:-}" ] || echo "adding the architecture $foreign to dpkg, since the standard library for boards is in it"
[ -z "${foreign:-}" ] || $sudo dpkg --add-architecture "$foreign"
$sudo apt-get update -q
# shellcheck disable=SC2086 # a list of names
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $want

hash -r
minor=$(rust_minor)
if [ "${minor:-0}" -lt "$msrv" ]; then
    echo "rustc is $(rustc --version 2>/dev/null || echo missing) at $(command -v rustc || echo no path), expected 1.$msrv or newer:" \
        "Debian 12 has it in bookworm-security (add that to its sources); with rustup, run 'rustup update'" >&2
    exit 1
fi
