//! Which instructions the kernel says this CPU has. Linux, Documentation/arch/arm64/elf_hwcaps.rst.

/// What `neon`, which every aarch64 Linux has, can be exceeded by.
pub(super) struct Features {
    pub crc: bool,
    pub dotprod: bool,
    pub i8mm: bool,
}

/// On systems other than Linux: none.
#[cfg(not(target_os = "linux"))]
pub(super) fn features() -> Features {
    Features { crc: false, dotprod: false, i8mm: false }
}

/// Features that every core has: on big.LITTLE the kernel reports what is common to all.
#[cfg(target_os = "linux")]
pub(super) fn features() -> Features {
    const HWCAP_CRC32: core::ffi::c_ulong = 1 << 7;
    const HWCAP_ASIMDDP: core::ffi::c_ulong = 1 << 20;
    const HWCAP2_I8MM: core::ffi::c_ulong = 1 << 13;
    // SAFETY: getauxval reads a table that the kernel gave to the process; unknown entries are 0.
    let (cap, cap2) = unsafe { (libc::getauxval(libc::AT_HWCAP), libc::getauxval(libc::AT_HWCAP2)) };
    let dotprod = cap & HWCAP_ASIMDDP != 0;
    Features { crc: cap & HWCAP_CRC32 != 0, dotprod, i8mm: dotprod && cap2 & HWCAP2_I8MM != 0 }
}
