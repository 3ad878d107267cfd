//! CRC32C over an instruction that takes eight bytes: three streams at once, since it takes one a cycle but answers after three.
//!
//! The streams are thirds of the bytes. A register after A and then B is the register after A times x^(bits of B), plus that
//! after B from zero: polynomials over GF(2) modulo Castagnoli's, reflected, so that the upper bit of a word is that of x^0.

use forerun_format::crc32c::POLY;

/// Bytes that are worth joining streams, which costs about as much as 2 KiB.
const STREAMS_MIN: usize = 8192;

/// As `scalar::crc32c`; `word` and `byte` are the instructions: a register and what it takes in.
#[inline(always)]
pub(crate) fn crc32c(bytes: &[u8], word: impl Fn(u32, u64) -> u32, byte: impl Fn(u32, u8) -> u32) -> u32 {
    let (words, tail) = bytes.as_chunks::<8>();
    let take = |c, w: &[u8; 8]| word(c, u64::from_le_bytes(*w));
    let mut c = !0;
    let mut rest = words;
    if bytes.len() >= STREAMS_MIN {
        let part = words.len() / 3;
        let (first, others) = words.split_at(part);
        let (second, others) = others.split_at(part);
        let (third, others) = others.split_at(part);
        let (mut c1, mut c2) = (0, 0);
        for ((a, b), d) in first.iter().zip(second).zip(third) {
            c = take(c, a);
            c1 = take(c1, b);
            c2 = take(c2, d);
        }
        let shift = power(64 * part);
        c = multiply(multiply(c, shift) ^ c1, shift) ^ c2;
        rest = others;
    }
    c = rest.iter().fold(c, take);
    !tail.iter().fold(c, |c, &b| byte(c, b))
}

/// CRC32C of some bytes and `bytes` more, from that of the first, `a`, and that of the others, `b`.
pub fn crc32c_join(a: u32, b: u32, bytes: usize) -> u32 {
    // What each starts from and is turned over by at its end cancels out.
    multiply(a, power(8 * bytes)) ^ b
}

/// `a` times `b`.
fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    for bit in (0..32).rev() {
        product ^= b & (a >> bit & 1).wrapping_neg();
        b = (b >> 1) ^ (POLY & (b & 1).wrapping_neg());
    }
    product
}

/// x^`n`.
fn power(mut n: usize) -> u32 {
    let (mut result, mut square) = (1 << 31, 1 << 30);
    while n > 0 {
        if n & 1 == 1 {
            result = multiply(result, square);
        }
        square = multiply(square, square);
        n >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use forerun_format::crc32c::crc32c;

    #[test]
    fn joined_parts_are_the_whole() {
        let bytes: [u8; 300] = core::array::from_fn(|i| (i * i / 7) as u8);
        for at in [0, 1, 7, 8, 150, 299, 300] {
            let (a, b) = bytes.split_at(at);
            assert_eq!(crc32c_join(crc32c(a), crc32c(b), b.len()), crc32c(&bytes), "{at}");
        }
    }
}
