//! CRC32C (Castagnoli polynomial 0x1EDC6F41, reflected), as in iSCSI (RFC 3720) and ext4.
//!
//! Sliced by eight; the table is built at compile time. The kernels have it in instructions where the CPU does.

/// The polynomial, reflected.
pub const POLY: u32 = 0x82F6_3B78;

static TABLE: [[u32; 256]; 8] = table();

const fn table() -> [[u32; 256]; 8] {
    let mut t = [[0u32; 256]; 8];
    let mut i = 0;
    while i < 256 {
        let mut c = i as u32;
        let mut k = 0;
        while k < 8 {
            c = if c & 1 == 1 { (c >> 1) ^ POLY } else { c >> 1 };
            k += 1;
        }
        t[0][i] = c;
        i += 1;
    }
    let mut s = 1;
    while s < 8 {
        let mut i = 0;
        while i < 256 {
            t[s][i] = (t[s - 1][i] >> 8) ^ t[0][(t[s - 1][i] & 255) as usize];
            i += 1;
        }
        s += 1;
    }
    t
}

/// Running checksum; feed bytes in any pieces.
#[derive(Debug, Clone, Copy)]
pub struct Crc32c(u32);

impl Default for Crc32c {
    fn default() -> Self {
        Self(!0)
    }
}

impl Crc32c {
    /// Adds `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        let mut c = self.0;
        let (words, rest) = bytes.as_chunks::<8>();
        for w in words {
            let lo = c ^ u32::from_le_bytes([w[0], w[1], w[2], w[3]]);
            c = TABLE[7][(lo & 255) as usize]
                ^ TABLE[6][(lo >> 8 & 255) as usize]
                ^ TABLE[5][(lo >> 16 & 255) as usize]
                ^ TABLE[4][(lo >> 24) as usize]
                ^ TABLE[3][w[4] as usize]
                ^ TABLE[2][w[5] as usize]
                ^ TABLE[1][w[6] as usize]
                ^ TABLE[0][w[7] as usize];
        }
        for &b in rest {
            c = (c >> 8) ^ TABLE[0][((c ^ u32::from(b)) & 255) as usize];
        }
        self.0 = c;
    }

    /// The checksum of all bytes so far.
    pub fn finish(self) -> u32 {
        !self.0
    }
}

/// CRC32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut c = Crc32c::default();
    c.update(bytes);
    c.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720 appendix B.4.
    #[test]
    fn rfc_3720_vectors() {
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFF; 32]), 0x62A8_AB43);
        let up: [u8; 32] = core::array::from_fn(|i| i as u8);
        assert_eq!(crc32c(&up), 0x46DD_794E);
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        let mut c = Crc32c::default();
        c.update(b"1234");
        c.update(b"56789");
        assert_eq!(c.finish(), 0xE306_9283);
    }
}
