#!/bin/sh
# Rules of the house that no compiler knows: where unsafe may live, how long a file may be, what may not be committed.
set -eu
bad=0
say() { echo "$1" >&2; bad=1; }

allowed='^runtime/linux/src/(arena|ring)\.rs|^runtime/linux/src/sys/|^runtime/kernels/src/(aarch64|lanes|x86_64)/|^camera/src/sys'
for f in $(git ls-files '*.rs'); do
    if grep -nE '\bunsafe (\{|fn|impl|trait)' "$f" | grep -vE '^[0-9]+: *//' >/dev/null && ! echo "$f" | grep -qE "$allowed"; then
        say "$f: unsafe outside of runtime/linux/src/{arena,ring,sys} and the kernels' lanes and CPU folders"
    fi
    lines=$(wc -l <"$f")
    [ "$lines" -le 600 ] || say "$f: $lines lines, expected at most 600: it wants to be two files"
done
for crate in runtime/format runtime/engine; do
    grep -q '^#!\[no_std\]' $crate/src/lib.rs || say "$crate: not no_std"
    grep -q '^#!\[forbid(unsafe_code)\]' $crate/src/lib.rs || say "$crate: does not forbid unsafe code"
done
for f in $(git ls-files); do
    size=$(stat -c %s "$f" 2>/dev/null || echo 0)
    [ "$size" -lt $((16 * 1024 * 1024)) ] || say "$f: $size bytes, expected under 16 MiB"
done
exit $bad
