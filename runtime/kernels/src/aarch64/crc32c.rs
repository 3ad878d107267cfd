//! FEAT_CRC32: eight bytes of CRC32C in one instruction. Armv8.0 leaves it to the core; every board's has it.

use super::hwcap;
use crate::{lanes, scalar};
use core::arch::aarch64::{__crc32cb, __crc32cd};

/// As `scalar::crc32c`.
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    #[target_feature(enable = "crc")]
    fn enabled(bytes: &[u8]) -> u32 {
        lanes::crc32c(bytes, |c, w| __crc32cd(c, w), |c, b| __crc32cb(c, b))
    }
    if hwcap::features().crc {
        // SAFETY: the line above.
        unsafe { enabled(bytes) }
    } else {
        scalar::crc32c(bytes)
    }
}
