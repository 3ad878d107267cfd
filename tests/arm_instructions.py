#!/usr/bin/env python3
"""Instructions per token of forerun and of llama.cpp on the same weights, under qemu-user: the table of docs/arm.md.

Arguments: llama.cpp's source, and element types as for `forerun-quant synth` (default: q8_0 experts=q4_k).
Needs what `make board` installs, and Debian's g++-aarch64-linux-gnu, cmake, qemu-user (qemu-user-static has no plugins)
and 7 GB in target/ for each mix of types. --profile prints the functions too; CARGO_PROFILE_RELEASE_STRIP=false in the
environment gives those of forerun names. MAKEFLAGS=-j4 builds sooner.
"""
import bisect
import collections
import os
import subprocess
import sys

DIR = "target/arm-instructions"
HERE = "tests/arm_instructions"
LAYERS = "4"  # three with linear attention, one with full
PROMPT, DECODE = 32, 8
# What qemu is told to be, and what llama.cpp's kernels are compiled for.
CPUS = [("cortex-a53", "armv8-a"), ("cortex-a76", "armv8.2-a+dotprod"), ("max", "armv8.2-a+dotprod+i8mm")]
OFF = ["GGML_NATIVE", "GGML_OPENMP", "BUILD_SHARED_LIBS", *(f"LLAMA_BUILD_{x}" for x in "APP COMMON TESTS TOOLS EXAMPLES SERVER".split())]
TOOLCHAIN = ["CMAKE_SYSTEM_NAME=Linux", "CMAKE_SYSTEM_PROCESSOR=aarch64", "CMAKE_BUILD_TYPE=Release",
             "CMAKE_C_COMPILER=aarch64-linux-gnu-gcc", "CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"]


def run(*command, **env):
    subprocess.run(command, check=True, env=dict(os.environ, **env), stdout=sys.stderr)


def build(source):
    """llama.cpp once for each CPU: only the kernels are compiled again."""
    os.makedirs(DIR, exist_ok=True)
    run("cc", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-o", f"{DIR}/blocks.so", f"{HERE}/blocks.c")
    run("tests/board.sh", "build")
    run("cargo", "build", "--release", "--locked", "--bin", "forerun-quant")
    libraries = ["src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a", "ggml/src/libggml-base.a"]
    for cpu, march in CPUS:
        options = [f"-D{x}" for x in [*TOOLCHAIN, *(f"{x}=OFF" for x in OFF), f"GGML_CPU_ARM_ARCH={march}"]]
        run("cmake", "-S", source, "-B", f"{DIR}/llama", *options)
        run("make", "-C", f"{DIR}/llama", "llama")
        include = [f"-I{source}/include", f"-I{source}/ggml/include"]
        run("aarch64-linux-gnu-g++", "-O2", "-static", *include, "-o", f"{DIR}/llama-{cpu}", f"{HERE}/llama.cpp",
            *(f"{DIR}/llama/{x}" for x in libraries))


def synth(types):
    mix = "-".join(types).replace("=", "-")
    packed, plain = (f"{DIR}/{mix}-{LAYERS}.{layout}.gguf" for layout in ("packed", "plain"))
    base = ["target/release/forerun-quant", "synth", "--shape", "35b-a3b", "--layers", LAYERS, "--no-vision"]
    for path, extra in ((packed, []), (plain, ["--plain"])):
        if not os.path.exists(path):
            run(*base, *(x for t in types for x in ("--type", t)), "--to", path, *extra)
    return packed, plain


def instructions(cpu, *command):
    """Instructions run, by the address of their block."""
    run("qemu-aarch64", "-cpu", cpu, "-plugin", f"{DIR}/blocks.so", *command, BLOCKS=f"{DIR}/blocks")
    counts = collections.Counter()
    with open(f"{DIR}/blocks") as blocks:
        for line in blocks:
            address, instructions, runs = line.split()
            counts[int(address, 16)] += int(instructions) * int(runs)
    return counts


def per_token(measure):
    """What a decoded token and a token of the prompt cost: differences of runs, in which all else cancels."""
    one, longer, twice = measure(1, 1), measure(1 + DECODE, 1), measure(1, 2)
    addresses = one.keys() | longer.keys() | twice.keys()
    decode = {a: (longer[a] - one[a]) / DECODE for a in addresses}
    prompt = {a: (twice[a] - one[a] - decode[a]) / PROMPT for a in addresses}
    return decode, prompt


def profile(binary, title, counts):
    """Functions with the most instructions. A static-pie binary lies where qemu loads such."""
    symbols = subprocess.run(["aarch64-linux-gnu-nm", "-C", "-n", binary], check=True, capture_output=True, text=True).stdout
    table = [(int(a, 16), name) for a, kind, name in (s.split(maxsplit=2) for s in symbols.splitlines() if s[0] != " ") if kind in "tTwW"]
    base = 0x5500000000 if min(counts) >= 0x5500000000 else 0
    functions = collections.Counter()
    for address, n in counts.items():
        at = bisect.bisect(table, (address - base, "\x7f")) - 1
        functions[table[at][1] if at >= 0 else "?"] += n
    print(f"\n{title}: {sum(counts.values()):,.0f}")
    for name, n in functions.most_common(14):
        print(f"  {n:14,.0f} {name[:140]}")


def main():
    args = [a for a in sys.argv[1:] if a != "--profile"]
    if not args:
        sys.exit(__doc__)
    build(args[0])
    packed, plain = synth(args[1:] or ["q8_0", "experts=q4_k"])
    bench = ["bench", "--resident", "--memory", "8G", "--threads", "1", "--json", "--model", packed, "--prefill", str(PROMPT)]
    rows = []
    for cpu, _ in CPUS:
        ours, theirs = "target/board/forerun", f"{DIR}/llama-{cpu}"
        a = per_token(lambda d, r: instructions(cpu, ours, *bench, "--decode", str(d), "--rounds", str(r)))
        b = per_token(lambda d, r: instructions(cpu, theirs, plain, str(PROMPT), str(d), str(r)))
        for work, x, y in zip(("decode", f"prompt of {PROMPT}"), a, b):
            if "--profile" in sys.argv:
                profile(ours, f"forerun, {cpu}, {work}", x)
                profile(theirs, f"llama.cpp, {cpu}, {work}", y)
            x, y = (sum(c.values()) / 1e6 for c in (x, y))
            rows.append(f"| {cpu} | {work} | {x:.1f} | {y:.1f} | {x / y:.2f} |")
    print("\n| CPU | work | forerun, millions | llama.cpp, millions | ratio |\n|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
