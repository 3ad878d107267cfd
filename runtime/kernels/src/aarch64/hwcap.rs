//! Which instructions the kernel says this CPU has. Linux, Documentation/arch/arm64/elf_hwcaps.rst.

/// What `neon`, which every aarch64 Linux has, can be exceeded by.
pub(super) struct Features {
    pub dotprod: bool,
    pub i8mm: bool,
}

/// On systems other than Linux: neither.
#[cfg(not(target_os = "linux"))]
pub(super) fn features() -> Features {
    Features { dotprod: false, i8mm: false }
}

/// Features that every core has: on big.LITTLE the kernel reports what is common to all.
#[cfg(target_os = "linux")]
pub(super) fn features() -> Features {
    const HWCAP_ASIMDDP: core::ffi::c_ulong = 1 << 20;
    const HWCAP2_I8MM: core::ffi::c_ulong = 1 << 13;
    // SAFETY: getauxval reads a table that the kernel gave to the process; unknown entries are 0.
    let (cap, cap2) = unsafe { (libc::getauxval(libc::AT_HWCAP), libc::getauxval(libc::AT_HWCAP2)) };
    let dotprod = cap & HWCAP_ASIMDDP != 0;
    Features { dotprod, i8mm: dotprod && cap2 & HWCAP2_I8MM != 0 }
}
