//! Which instructions the kernel says this CPU has. Linux, Documentation/arch/arm64/elf_hwcaps.rst.

/// What `neon`, which every aarch64 Linux has, can be exceeded by.
pub(super) struct Features {
    pub dotprod: bool,
}

/// On systems other than Linux: neither.
#[cfg(not(target_os = "linux"))]
pub(super) fn features() -> Features {
    Features { dotprod: false }
}

/// Features that every core has: on big.LITTLE the kernel reports what is common to all.
#[cfg(target_os = "linux")]
pub(super) fn features() -> Features {
    const HWCAP_ASIMDDP: core::ffi::c_ulong = 1 << 20;
    // SAFETY: getauxval reads a table that the kernel gave to the process; unknown entries are 0.
    let cap = unsafe { libc::getauxval(libc::AT_HWCAP) };
    Features { dotprod: cap & HWCAP_ASIMDDP != 0 }
}
