#!/bin/sh
# Binaries for aarch64 boards, built on another machine, and their tests under qemu-user.
# board.sh build: static forerun and forerun-quant in target/board. board.sh test: what docs/building.md lists.
set -eu
target=aarch64-unknown-linux-gnu

# The user's own toolchain if it has the target (rustup target add), else Debian's, which is beside it.
rustc=${RUSTC:-rustc}
if [ ! -d "$("$rustc" --print target-libdir --target $target 2>/dev/null)" ]; then
    rustc=/usr/bin/rustc
fi
export RUSTC="$rustc" CARGO_TARGET_DIR=target/arm
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-C target-feature=+crt-static"

build() {
    echo "building for $target with $("$rustc" --version)"
    cargo build --release --locked --target $target --bin forerun --bin forerun-quant
    mkdir -p target/board
    cp target/arm/$target/release/forerun target/arm/$target/release/forerun-quant target/board/
    for name in forerun forerun-quant; do
        readelf -h target/board/$name | grep -E 'Class|Machine'
        ! readelf -lW target/board/$name | grep -q INTERP || { echo "$name wants a loader: it is not static" >&2; exit 1; }
        ls -l target/board/$name
    done
}

# $1: CPU, as qemu calls it; $2: the kernels it must be found to have; the rest: arguments for cargo test.
run_tests() {
    cpu=$1
    kernels=$2
    shift 2
    echo "--- $cpu: $kernels"
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -cpu $cpu" FORERUN_EXPECT_KERNELS=$kernels \
        cargo test --quiet --locked --target $target "$@"
}

kernels_of() {
    case $1 in
        cortex-a53 | cortex-a72) echo neon,scalar ;;
        cortex-a76 | neoverse-n1) echo dotprod,neon,scalar ;;
        max) echo i8mm,dotprod,neon,scalar ;;
    esac
}

case ${1:-} in
    build) build ;;
    test)
        build
        for cpu in cortex-a53 cortex-a72 cortex-a76 neoverse-n1 max; do
            run_tests $cpu "$(kernels_of $cpu)" -p forerun-kernels --tests
        done
        # Whole models run some 20 times slower than on this machine: each variant once, on a CPU that has no better one, and
        # scalar on the oldest.
        for cpu in cortex-a53 cortex-a76 max; do
            case $cpu in
                cortex-a53) variants=neon,scalar ;;
                *) variants=$(kernels_of $cpu | cut -d, -f1) ;;
            esac
            export FORERUN_TEST_KERNELS="$variants"
            run_tests $cpu "$(kernels_of $cpu)" -p forerun-tests --test golden_text --test golden_vision --test golden_prompt
            for kernels in $(echo "$variants" | tr , ' '); do
                echo "--- $cpu: release with $kernels"
                # qemu-user answers ENOSYS to io_uring, so experts come through pread here.
                FORERUN_KERNELS=$kernels tests/release.sh target/board "qemu-aarch64-static -cpu $cpu"
            done
        done
        ;;
    *) echo "usage: board.sh build|test" >&2; exit 2 ;;
esac
