//! Variants for x86-64: AVX2 with FMA and F16C, AVX-512 with VNNI, and that with AMX.

mod amx;
mod avx2;
mod avx512vnni;
mod cpuid;
mod crc32c;
mod narrow;
mod tile;

use crate::KernelSet;
use crate::lanes::variant;

variant!(AVX2, avx2_entries, avx2::Avx2, 2, 4, [1, 6], "avx2", "avx2,fma,f16c");
variant!(
    AVX512VNNI,
    avx512vnni_entries,
    avx512vnni::Avx512Vnni,
    8,
    4,
    [4, 6],
    "avx512vnni",
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
);
variant!(
    AMX,
    amx_entries,
    avx512vnni::Avx512<true>,
    8,
    4,
    [4, 6],
    "amx",
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
);

/// The variants that this CPU and operating system run, best first.
pub(crate) fn available() -> impl Iterator<Item = &'static KernelSet> {
    let cpuid::Features { avx2, avx512vnni, amx } = cpuid::features();
    [(amx && amx::permitted(), &AMX), (avx512vnni, &AVX512VNNI), (avx2, &AVX2)]
        .into_iter()
        .filter(|(has, _)| *has)
        .map(|(_, set)| set)
}
