//! SSE4.2: eight bytes of CRC32C in one instruction.

use crate::lanes;
use core::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u64};

/// As `scalar::crc32c`.
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    #[target_feature(enable = "sse4.2")]
    fn enabled(bytes: &[u8]) -> u32 {
        lanes::crc32c(bytes, |c, w| _mm_crc32_u64(c.into(), w) as u32, |c, b| _mm_crc32_u8(c, b))
    }
    // SAFETY: available() hands a set out only where cpuid::features() found SSE4.2.
    unsafe { enabled(bytes) }
}
