//! Variants for aarch64: NEON alone (Cortex-A53, A72, A73) and with dot products of bytes (A55, A76), and
//! products of byte matrices (no board so far).

mod crc32c;
mod dotprod;
mod hwcap;
mod i8mm;
mod narrow;
mod neon;

use crate::KernelSet;
use crate::lanes::variant;

variant!(NEON, neon_entries, neon::Lanes<neon::Widening>, 2, 2, [1, 6], "neon", "neon");
variant!(DOTPROD, dotprod_entries, neon::Lanes<dotprod::Sdot>, 2, 2, [1, 6], "dotprod", "neon,dotprod");
variant!(I8MM, i8mm_entries, neon::Lanes<i8mm::Smmla>, 2, 2, [1, 6], "i8mm", "neon,dotprod,i8mm");

/// The variants that this CPU runs, best first.
pub(crate) fn available() -> impl Iterator<Item = &'static KernelSet> {
    let has = hwcap::features();
    [(has.i8mm, &I8MM), (has.dotprod, &DOTPROD), (true, &NEON)].into_iter().filter(|(has, _)| *has).map(|(_, set)| set)
}
