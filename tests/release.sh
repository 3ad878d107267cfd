#!/bin/sh
# What the release binaries in folder $1 promise: static, small, and right answers.
set -eu
bin=$1
limit=$((8 * 1024 * 1024))
for name in forerun forerun-quant; do
    size=$(stat -c %s "$bin/$name")
    [ "$size" -lt "$limit" ] || { echo "$name: $size bytes, expected under $limit" >&2; exit 1; }
    linked=$(ldd "$bin/$name" 2>&1 || true)
    case $linked in
        *"statically linked"* | *"not a dynamic executable"*) ;;
        *) printf '%s is not static:\n%s\n' "$name" "$linked" >&2; exit 1 ;;
    esac
    echo "$name: static, $size bytes"
done
"$bin/forerun" demo
"$bin/forerun" verify --model tests/models/tiny-moe.gguf --image tests/demo/scene_083.png --prompt "Is the door open?"
"$bin/forerun-quant" inspect tests/models/tiny-moe.gguf
