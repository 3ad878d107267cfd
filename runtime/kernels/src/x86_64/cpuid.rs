//! Which instructions the CPU has and the operating system lets programs use. Intel SDM volume 2, CPUID; volume 1, 13.3.

use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

/// Whether `avx2` (with FMA and F16C) and `avx512vnni` (with F, BW, DQ, VL) can run.
pub(super) fn features() -> (bool, bool) {
    let bit = |word: u32, bits: &[u32]| bits.iter().all(|b| word >> b & 1 == 1);
    if __cpuid(0).eax < 7 {
        return (false, false);
    }
    let (one, seven) = (__cpuid(1), __cpuid_count(7, 0));
    // FMA, OSXSAVE, AVX, F16C
    if !bit(one.ecx, &[12, 27, 28, 29]) {
        return (false, false);
    }
    // SAFETY: bit 27 of CPUID.1:ECX, checked above, says that XGETBV exists and may be used.
    let saved = unsafe { xcr0() };
    let avx2 = saved & 0b110 == 0b110 && bit(seven.ebx, &[5]);
    // F, DQ, BW, VL; VNNI
    let avx512 = saved & 0xE6 == 0xE6 && bit(seven.ebx, &[16, 17, 30, 31]) && bit(seven.ecx, &[11]);
    (avx2, avx2 && avx512)
}

#[target_feature(enable = "xsave")]
fn xcr0() -> u64 {
    // SAFETY: register 0 always exists where XGETBV does.
    unsafe { _xgetbv(0) }
}
