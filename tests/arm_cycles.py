#!/usr/bin/env python3
"""Instructions and modelled cycles per 256 weights of the Arm kernels' inner loops: the table of docs/arm.md.

Needs what `make test-arm` installs, and Debian's llvm-19. qemu traces one product, which gives the instructions that run
once for each superblock; llvm-mca models how a core issues them, with all loads hitting the first-level cache.
"""
import collections
import os
import re
import subprocess
import tempfile

TARGET = "aarch64-unknown-linux-gnu"
DIR = "target/arm-cycles"
BINARY = f"{DIR}/{TARGET}/release/examples/product"
ROWS, N, REPEATS = 8, 2048, 4
# The core, llvm's model of it, the variant it runs, and the CPU that qemu is told to be.
CORES = [
    ("A53", "cortex-a53", "neon", "cortex-a53"),
    ("A72", "cortex-a72", "neon", "cortex-a72"),
    ("A55", "cortex-a55", "dotprod", "cortex-a76"),
    ("A76", "neoverse-n1", "dotprod", "cortex-a76"),
]
BYTES = {"q8_0": 272, "q6_k": 210, "q5_k": 176, "q4_k": 144, "q4_0": 144, "iq4_xs": 136, "mxfp4": 136, "q3_k": 110}


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def rustc():
    """The user's own if it has the target, else Debian's, as in board.sh."""
    own = subprocess.run(["rustc", "--print", "target-libdir", "--target", TARGET], capture_output=True, text=True)
    return "rustc" if os.path.isdir(own.stdout.strip()) else "/usr/bin/rustc"


def build():
    env = dict(os.environ, CARGO_TARGET_DIR=DIR, CARGO_PROFILE_RELEASE_STRIP="false", CARGO_PROFILE_RELEASE_LTO="off")
    env.setdefault("RUSTC", rustc())
    env["CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER"] = "aarch64-linux-gnu-gcc"
    env["CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS"] = "-C target-feature=+crt-static -C relocation-model=static"
    command = ["cargo", "build", "-q", "--release", "--locked", "--target", TARGET, "-p", "forerun-kernels"]
    subprocess.run([*command, "--example", "product"], check=True, env=env)


def disassembly():
    """Function name to {address: instruction}."""
    functions, name = collections.defaultdict(dict), ""
    for line in output("aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", BINARY).splitlines():
        if m := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            name = m[1]
        elif m := re.match(r"\s*([0-9a-f]+):\t(.*)", line):
            functions[name][int(m[1], 16)] = m[2]
    return functions


def inner_loop(code, variant, block, cpu, columns):
    """Instructions per superblock and all columns, and those that run about once for each."""
    with tempfile.NamedTemporaryFile("r") as log:
        trace = ["-singlestep", "-d", "exec,nochain", "-dfilter", f"{min(code):#x}..{max(code):#x}", "-D", log.name]
        args = [variant, block, str(ROWS), str(N), str(columns), str(REPEATS)]
        output("qemu-aarch64-static", "-cpu", cpu, *trace, BINARY, *args)
        counts = collections.Counter(int(m[1], 16) for m in re.finditer(r"/([0-9a-f]{16})/", log.read()))
    superblocks = ROWS * N // 256 * REPEATS
    loop = [code[a] for a in sorted(counts) if a in code and counts[a] > superblocks / 2]
    return sum(counts.values()) / superblocks, loop


def cycles(model, loop):
    """Modelled cycles of the loop. Branches are left out: they are predicted."""
    lines = [re.sub(r"\s*(<.*>|//.*)", "", i) for i in loop if not re.match(r"(b\.?\w*|cbn?z|tbn?z)\t", i)]
    asm = "\n".join(re.sub(r"^(adrp?\t\w+, ).*", r"\g<1>0", line) for line in lines)
    command = ["llvm-mca-19", f"-mtriple={TARGET}", f"-mcpu={model}", "-iterations=200"]
    report = subprocess.run(command, input=asm, check=True, capture_output=True, text=True).stdout
    return int(re.search(r"Total Cycles:\s+(\d+)", report)[1]) / 200


def main():
    build()
    functions = disassembly()
    print("| type | core | kernels | instructions | cycles | bytes/cycle | cycles, two columns, each |")
    print("|---|---|---|---|---|---|---|")
    for block, size in BYTES.items():
        for core, model, variant, cpu in CORES:
            found = [f for f in functions if f"{variant}_entries6matmul" in f]
            code = functions[max(found, key=lambda f: len(functions[f]))]
            count, loop = inner_loop(code, variant, block, cpu, 1)
            one = cycles(model, loop)
            two = cycles(model, inner_loop(code, variant, block, cpu, 2)[1]) / 2
            print(f"| {block} | {core} | {variant} | {count:.0f} | {one:.0f} | {size / one:.1f} | {two:.0f} |", flush=True)


main()
