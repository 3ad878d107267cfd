//! Variants for x86-64: AVX2 with FMA and F16C, and AVX-512 with VNNI.

mod avx2;
mod avx512vnni;
mod cpuid;
mod narrow;
mod tile;

use crate::KernelSet;
use crate::lanes::variant;

variant!(AVX2, avx2_entries, avx2::Avx2, 2, 4, "avx2", "avx2,fma,f16c");
variant!(
    AVX512VNNI,
    avx512vnni_entries,
    avx512vnni::Avx512Vnni,
    8,
    4,
    "avx512vnni",
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
);

/// The variants that this CPU and operating system run, best first.
pub(crate) fn available() -> impl Iterator<Item = &'static KernelSet> {
    let (avx2, avx512vnni) = cpuid::features();
    [(avx512vnni, &AVX512VNNI), (avx2, &AVX2)].into_iter().filter(|(has, _)| *has).map(|(_, set)| set)
}
