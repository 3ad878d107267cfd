//! Products of quantized matrices with int8 activations, 256 weights at a time: decode once, multiply with several columns.

use super::decode::Decode;
use super::isa::{Dots, Isa, Narrow};
use crate::{ActQ8, Columns, act_blocks};
use forerun_format::BlockType;
use forerun_format::block::{
    BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4K, BlockQ5_0, BlockQ5K, BlockQ6K,
    BlockQ8_0,
};

/// # Safety
/// I's instructions are enabled; `scalar::check_matmul` accepted the arguments.
#[inline(always)]
pub(super) unsafe fn matmul<I: Isa, const C: usize>(block: BlockType, w: &[u8], x: Columns<'_>, out: &mut [f32]) {
    macro_rules! run {
        ($b:ty) => {
            // SAFETY: passed on.
            unsafe { I::matrix::<$b, C>(bytemuck::cast_slice(w), x, out) }
        };
    }
    match block {
        BlockType::Q8_0 => run!(BlockQ8_0),
        BlockType::Q5_0 => run!(BlockQ5_0),
        BlockType::Q4_0 => run!(BlockQ4_0),
        BlockType::Iq4Nl => run!(BlockIq4Nl),
        BlockType::Iq4Xs => run!(BlockIq4Xs),
        BlockType::Mxfp4 => run!(BlockMxfp4),
        BlockType::Q6K => run!(BlockQ6K),
        BlockType::Q5K => run!(BlockQ5K),
        BlockType::Q4K => run!(BlockQ4K),
        BlockType::Q3K => run!(BlockQ3K),
        BlockType::Q2K => run!(BlockQ2K),
        BlockType::F32 | BlockType::F16 | BlockType::BF16 | BlockType::I8 => unreachable!("not quantized"),
    }
}

/// [`Isa::matrix`] of instruction sets that multiply rows one by one.
///
/// # Safety
/// As for [`Isa::matrix`].
#[inline(always)]
pub(crate) unsafe fn tiles<I: Dots, B: Decode, const C: usize>(w: &[B], x: Columns<'_>, out: &mut [f32]) {
    let (columns, per_row) = (x.count(), x.n / (B::GROUPS * 32));
    let per_column = act_blocks(x.n);
    let mut c = 0;
    while c < columns {
        // A row is decoded once for all columns of a tile, so what is left over after whole tiles of C goes in halves of it.
        let left = columns - c;
        let width = [C, 4, 2].into_iter().find(|&w| w <= C && w <= left).unwrap_or(1);
        let x = &x.q8[c * per_column..];
        for (row, out) in w.chunks_exact(per_row).zip(out.chunks_exact_mut(columns)) {
            let out = &mut out[c..];
            // SAFETY: x holds `width` columns from here on, by width <= left; a row is per_row blocks.
            unsafe {
                match width {
                    4 if C > 4 => tile::<I, B, 4>(row, x, per_column, out),
                    2 if C > 2 => tile::<I, B, 2>(row, x, per_column, out),
                    1 => tile::<I, B, 1>(row, x, per_column, out),
                    _ => tile::<I, B, C>(row, x, per_column, out),
                }
            }
        }
        c += width;
    }
}

/// Bytes that the weights of a single column are fetched ahead of their use: the multiplications are done sooner than the
/// hardware's own prefetcher brings the next line.
const AHEAD: usize = 2048;

/// One row times `C` columns. Each result is the sum of its own 16 lanes, whatever `C`.
#[inline(always)]
unsafe fn tile<I: Dots, B: Decode, const C: usize>(row: &[B], x: &[ActQ8], per_column: usize, out: &mut [f32]) {
    let per = 8 / B::GROUPS;
    assert!(x.len() >= C * per_column && row.len() <= per * per_column && out.len() >= C);
    // SAFETY: superblock s < per_column has `per` blocks in row (the last one, if shorter, in a copy filled up with zeros)
    // and an ActQ8 in each of the C columns, by the assertion.
    unsafe {
        let mut acc = [I::zero(); C];
        for s in 0..per_column {
            let at = s * per;
            if C == 1 {
                for line in (0..per * size_of::<B>()).step_by(64) {
                    I::prefetch(row.as_ptr().wrapping_add(at).cast::<u8>().wrapping_add(AHEAD + line));
                }
            }
            if at + per <= row.len() {
                superblock::<I, B, C>(row.as_ptr().add(at), x.as_ptr().add(s), per_column, &mut acc);
            } else {
                let mut rest = [B::zeroed(); 8];
                rest[..row.len() - at].copy_from_slice(&row[at..]);
                superblock::<I, B, C>(rest.as_ptr(), x.as_ptr().add(s), per_column, &mut acc);
            }
        }
        for c in 0..C {
            out[c] = I::fold(acc[c]);
        }
    }
}

#[inline(always)]
unsafe fn superblock<I: Dots, B: Decode, const C: usize>(
    w: *const B,
    x: *const ActQ8,
    per_column: usize,
    acc: &mut [I::F; C],
) {
    // SAFETY: the caller vouches for w and for x + c * per_column, c < C.
    unsafe {
        let (scale, min) = B::scales::<I>(w);
        let mut scaled = [I::zero(); C];
        for c in 0..C {
            let x = &*x.add(c * per_column);
            scaled[c] = I::mul(scale, I::twice(I::N::load_f32(x.d.as_ptr())));
            if B::MIN {
                acc[c] = I::fnma(min, I::load(x.sums.as_ptr()), acc[c]);
            }
        }
        // Written out, so that shifts and lanes are constants.
        pair::<I, B, C>(w, x, per_column, &scaled, acc, 0);
        pair::<I, B, C>(w, x, per_column, &scaled, acc, 1);
        pair::<I, B, C>(w, x, per_column, &scaled, acc, 2);
        pair::<I, B, C>(w, x, per_column, &scaled, acc, 3);
    }
}

/// Groups `2 pair` and `2 pair + 1` times `C` columns.
#[inline(always)]
unsafe fn pair<I: Dots, B: Decode, const C: usize>(
    w: *const B,
    x: *const ActQ8,
    per_column: usize,
    scaled: &[I::F; C],
    acc: &mut [I::F; C],
    pair: usize,
) {
    // SAFETY: as in superblock().
    unsafe {
        let weights = I::pair::<B>(B::decode::<I::N>(w, 2 * pair), B::decode::<I::N>(w, 2 * pair + 1));
        for c in 0..C {
            let quants = (*x.add(c * per_column)).qs.as_ptr().add(64 * pair);
            acc[c] = I::add_dots::<B>(acc[c], weights, quants, scaled[c], pair);
        }
    }
}
