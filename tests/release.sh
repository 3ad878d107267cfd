#!/bin/sh
# What the release binaries in folder $1 promise: static, small, and right answers. $2 runs them, if this machine cannot.
set -eu
bin=$1
run=${2:-}
limit=$((8 * 1024 * 1024))
for name in forerun forerun-quant; do
    size=$(stat -c %s "$bin/$name")
    [ "$size" -lt "$limit" ] || { echo "$name: $size bytes, expected under $limit" >&2; exit 1; }
    headers=$(readelf -lW "$bin/$name")
    case $headers in
        *INTERP*) printf '%s is not static:\n%s\n' "$name" "$headers" >&2; exit 1 ;;
    esac
    echo "$name: static, $size bytes"
done
# shellcheck disable=SC2086 # a command and its arguments
$run "$bin/forerun" demo
$run "$bin/forerun" verify --model tests/models/tiny-moe.gguf --image tests/demo/scene_083.png --prompt "Is the door open?"
$run "$bin/forerun-quant" inspect tests/models/tiny-moe.gguf
