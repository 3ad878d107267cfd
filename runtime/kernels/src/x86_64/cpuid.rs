//! Which instructions the CPU has and the operating system lets programs use. Intel SDM volume 2, CPUID; volume 1, 13.3.

use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

/// Which variants can run: `avx2` takes FMA, F16C and SSE4.2 as well, `avx512vnni` F, BW, DQ, VL, `amx` INT8.
#[derive(Default)]
pub(super) struct Features {
    pub avx2: bool,
    pub avx512vnni: bool,
    /// If the system permits it.
    pub amx: bool,
}

pub(super) fn features() -> Features {
    let bit = |word: u32, bits: &[u32]| bits.iter().all(|b| word >> b & 1 == 1);
    if __cpuid(0).eax < 7 {
        return Features::default();
    }
    let (one, seven) = (__cpuid(1), __cpuid_count(7, 0));
    // FMA, SSE4.2, OSXSAVE, AVX, F16C
    if !bit(one.ecx, &[12, 20, 27, 28, 29]) {
        return Features::default();
    }
    // SAFETY: bit 27 of CPUID.1:ECX, checked above, says that XGETBV exists and may be used.
    let saved = unsafe { xcr0() };
    let avx2 = saved & 0b110 == 0b110 && bit(seven.ebx, &[5]);
    // F, DQ, BW, VL; VNNI
    let avx512 = saved & 0xE6 == 0xE6 && bit(seven.ebx, &[16, 17, 30, 31]) && bit(seven.ecx, &[11]);
    let avx512vnni = avx2 && avx512;
    // TILE, INT8; XTILECFG and XTILEDATA saved.
    let amx = avx512vnni && saved & 0x6_0000 == 0x6_0000 && bit(seven.edx, &[24, 25]);
    Features { avx2, avx512vnni, amx }
}

#[target_feature(enable = "xsave")]
fn xcr0() -> u64 {
    // SAFETY: register 0 always exists where XGETBV does.
    unsafe { _xgetbv(0) }
}
