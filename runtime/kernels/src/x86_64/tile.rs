//! Quantized products for AVX-512 VNNI: one column by four rows at a time, or a tile of 16 columns in the lanes.
//!
//! Both sum alike, so that a column's bits do not depend on its company. The products of a *part* (a group of 32, or its
//! halves where they have scales of their own) are added as integers, exactly; part `i` of every superblock goes to f32
//! sum `place(i)`; at the end these are added pairwise.

use super::avx512vnni::Avx512Vnni as I;
use super::narrow::Avx;
use crate::lanes::{Decode, Isa, Narrow};
use crate::scalar::{check_quantize, quantize_block};
use crate::{ACT_LOOSE_MAX, ACT_TILE, ActQ8, Columns, act_blocks};
use core::arch::x86_64::*;
use forerun_format::block::QK_K;

/// 256 activations of each of 16 columns, column by column in the lanes: the fields of 16 [`ActQ8`], turned.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct ActTile {
    d: [[f32; ACT_TILE]; 8],
    sums: [[f32; ACT_TILE]; 16],
    /// Four successive quants of each column.
    qs: [[[i8; 4]; ACT_TILE]; 64],
}
const _: () = assert!(size_of::<ActTile>() == ACT_TILE * size_of::<ActQ8>());

impl ActTile {
    /// Quants of group `g`: `(8 quads, columns, 4)`.
    pub(super) fn quads(&self, g: usize) -> *const i8 {
        self.qs[g * 8..][..8].as_ptr().cast()
    }

    /// Scales of group `g`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    pub(super) fn scales(&self, g: usize) -> __m512 {
        // SAFETY: a row of 16.
        unsafe { _mm512_loadu_ps(self.d[g].as_ptr()) }
    }

    /// Sums of group `g`: of its halves, added.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    pub(super) fn group_sums(&self, g: usize) -> __m512 {
        // SAFETY: rows of 16.
        unsafe {
            _mm512_add_ps(_mm512_loadu_ps(self.sums[2 * g].as_ptr()), _mm512_loadu_ps(self.sums[2 * g + 1].as_ptr()))
        }
    }
}

/// Columns that follow as a tile, or one.
fn width(left: usize) -> usize {
    if left > ACT_LOOSE_MAX { left.min(ACT_TILE) } else { 1 }
}

/// As `scalar::quantize_act`; columns of a tile are woven.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) fn quantize(x: &[f32], n: usize, out: &mut [ActQ8]) {
    check_quantize(x, n, out);
    let (columns, blocks) = (x.len() / n, act_blocks(n));
    let mut c = 0;
    while c < columns {
        let width = width(columns - c);
        let (x, out) = (&x[c * n..][..width * n], &mut out[c * blocks..]);
        if width == 1 {
            x.chunks(QK_K).zip(out).for_each(|(x, o)| quantize_block(x, o));
        } else {
            weave(x, n, bytemuck::cast_slice_mut(&mut out[..ACT_TILE * blocks]));
        }
        c += width;
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn weave(x: &[f32], n: usize, out: &mut [ActTile]) {
    let columns = x.len() / n;
    let mut apart = [<ActQ8 as bytemuck::Zeroable>::zeroed(); ACT_TILE];
    for (s, o) in out.iter_mut().enumerate() {
        for (x, a) in x.chunks_exact(n).zip(&mut apart) {
            quantize_block(&x[s * QK_K..n.min((s + 1) * QK_K)], a);
        }
        debug_assert!(columns <= ACT_TILE);
        const WORDS: usize = size_of::<ActQ8>() / 4;
        let (from, to) = (apart.as_ptr().cast::<f32>(), (&raw mut *o).cast::<f32>());
        // The last 16 words overlap the ones before.
        for first in [0, 16, 32, 48, 64, WORDS - 16] {
            // SAFETY: the words from `first` on of 16 blocks, and 16 rows of the tile.
            unsafe { turn(from.add(first), WORDS, to.add(first * ACT_TILE)) };
        }
    }
}

/// `to[c][r] = from[r][c]` for 16 rows and columns of 32 bits; rows of `from` are `stride` apart.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn turn(from: *const f32, stride: usize, to: *mut f32) {
    // SAFETY: the caller vouches for both.
    unsafe {
        let mut a = [_mm512_setzero_ps(); 16];
        let mut b = a;
        for (r, a) in a.iter_mut().enumerate() {
            *a = _mm512_loadu_ps(from.add(r * stride));
        }
        // Pairs of rows, pairs of pairs, then quarters of registers, twice.
        for i in (0..16).step_by(2) {
            b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
        }
        for i in (0..16).step_by(4) {
            for k in 0..2 {
                let (x, y) = (_mm512_castps_pd(b[i + k]), _mm512_castps_pd(b[i + 2 + k]));
                a[i + 2 * k] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
                a[i + 2 * k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
            }
        }
        for i in [0, 8] {
            for k in 0..4 {
                b[i + k] = _mm512_shuffle_f32x4::<0x88>(a[i + k], a[i + 4 + k]);
                b[i + 4 + k] = _mm512_shuffle_f32x4::<0xDD>(a[i + k], a[i + 4 + k]);
            }
        }
        for k in 0..4 {
            // Rows k and 8 + k are even quarters, 4 + k and 12 + k odd ones.
            for (odd, b) in [(0, [b[k], b[8 + k]]), (4, [b[4 + k], b[12 + k]])] {
                _mm512_storeu_ps(to.add((odd + k) * 16), _mm512_shuffle_f32x4::<0x88>(b[0], b[1]));
                _mm512_storeu_ps(to.add((odd + 8 + k) * 16), _mm512_shuffle_f32x4::<0xDD>(b[0], b[1]));
            }
        }
    }
}

/// As [`Isa::matrix`], with activations of [`quantize`].
///
/// # Safety
/// AVX-512 VNNI is enabled in the caller; `scalar::check_matmul` accepted the arguments.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn matrix<D: Decode>(w: &[D], x: Columns<'_>, out: &mut [f32]) {
    let tiles = tiles(x.count());
    // SAFETY: check_matmul compared every length; tiles come before loose columns, as quantize() left them.
    unsafe {
        if tiles > 0 {
            let woven = &x.q8[..tiles * ACT_TILE * act_blocks(x.n)];
            products::<D>(w, x.n, bytemuck::cast_slice(woven), x.count(), out);
        }
        loose(w, x, tiles * ACT_TILE, out);
    }
}

/// Tiles that `columns` columns make.
pub(super) fn tiles(columns: usize) -> usize {
    columns / ACT_TILE + usize::from(columns % ACT_TILE > ACT_LOOSE_MAX)
}

/// The columns from `first` on, one by one.
///
/// # Safety
/// As for [`matrix`]; they are no tile.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn loose<D: Decode>(w: &[D], x: Columns<'_>, first: usize, out: &mut [f32]) {
    let (columns, blocks) = (x.count(), act_blocks(x.n));
    for c in first..columns {
        // SAFETY: passed on.
        unsafe { column::<D>(w, x.n, &x.q8[c * blocks..][..blocks], &mut out[c..], columns) };
    }
}

/// How much decoded bytes lie above their weights, made unsigned as VNNI wants its first factor.
pub(super) const fn offset<D: Decode>() -> u8 {
    if D::SIGNED { 128 } else { D::OFFSET }
}

/// Where the sum of part `i` of a superblock stands among the sums.
pub(super) const fn place<D: Decode>(i: usize) -> usize {
    if D::HALVES { i % 4 * 4 + i / 4 } else { i % 2 * 4 + i / 2 }
}

/// Groups `2 p` and `2 p + 1`, unsigned.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn unsigned<D: Decode>(w: *const D, p: usize) -> __m512i {
    // SAFETY: passed on.
    unsafe {
        if let Some(at) = D::NIBBLES {
            let both = _mm512_broadcast_i64x4(_mm256_loadu_si256(w.cast::<u8>().add(at + 32 * p).cast()));
            let shift = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(4));
            return _mm512_and_si512(_mm512_srlv_epi16(both, shift), _mm512_set1_epi8(15));
        }
        let low = _mm512_castsi256_si512(D::decode::<Avx>(w, 2 * p));
        let bytes = _mm512_inserti64x4::<1>(low, D::decode::<Avx>(w, 2 * p + 1));
        if D::SIGNED { _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)) } else { bytes }
    }
}

/// The superblock at block `at` of a row: in place, or, past the row's end, in a copy filled up with zeros.
#[inline(always)]
pub(super) fn superblock<D: Decode>(row: &[D], at: usize, copy: &mut [D; 8]) -> *const D {
    if at + 8 / D::GROUPS <= row.len() {
        return row[at..].as_ptr();
    }
    *copy = [D::zeroed(); 8];
    copy[..row.len() - at].copy_from_slice(&row[at..]);
    copy.as_ptr()
}

/// Rows that [`column`] reads side by side.
const ROWS: usize = 4;

/// Bytes that weights are fetched ahead of their use: far ahead into the second-level cache, whose queue is long, then into
/// the first, whose few fill buffers would not last for the latency of memory.
const FAR: usize = 8192;
const NEAR: usize = 1024;

/// Matrix times one column; result `r` goes to `out[r * stride]`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn column<D: Decode>(w: &[D], n: usize, x: &[ActQ8], out: &mut [f32], stride: usize) {
    let per_row = n / (D::GROUPS * 32);
    let rows = w.len() / per_row;
    let per = 8 / D::GROUPS;
    let mut copies = [[D::zeroed(); 8]; ROWS];
    for first in (0..rows).step_by(ROWS) {
        // Past the last row, that one once more.
        let row = |i: usize| &w[(first + i).min(rows - 1) * per_row..][..per_row];
        // SAFETY: four superblocks and one of activations; prefetching never faults.
        unsafe {
            let mut acc = [_mm512_setzero_ps(); ROWS];
            for (s, x) in x.iter().enumerate() {
                let mut four = [core::ptr::null(); ROWS];
                for (i, p) in four.iter_mut().enumerate() {
                    *p = superblock(row(i), s * per, &mut copies[i]);
                    for line in (0..per * size_of::<D>()).step_by(64) {
                        let line = p.cast::<u8>().wrapping_add(line);
                        _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(FAR).cast());
                        I::prefetch(line.wrapping_add(NEAR));
                    }
                }
                if D::HALVES {
                    halves::<D>(four, x, &mut acc);
                } else {
                    groups::<D>(four, x, &mut acc);
                }
            }
            for i in 0..ROWS.min(rows - first) {
                let half = |x| if i % 2 == 0 { _mm512_castps512_ps256(x) } else { _mm512_extractf32x8_ps::<1>(x) };
                out[(first + i) * stride] =
                    if D::HALVES { I::fold(acc[i]) } else { super::avx2::fold8(half(acc[i / 2])) };
            }
        }
    }
}

/// Sums of 16 products each: lane `4 k + p` those of bytes `64 p + 16 k` and on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn dots(w: [__m512i; 4], x: &ActQ8) -> __m512i {
    // SAFETY: the caller enabled the instructions; x has 256 quants.
    unsafe {
        let dot = |p: usize| {
            _mm512_dpbusd_epi32(_mm512_setzero_si512(), w[p], _mm512_loadu_si512(x.qs.as_ptr().add(64 * p).cast()))
        };
        let pairs = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (a, b) = (pairs(dot(0), dot(1)), pairs(dot(2), dot(3)));
        _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn row_dots<D: Decode>(w: *const D, x: &ActQ8) -> __m512i {
    // SAFETY: passed on.
    unsafe { dots([unsigned(w, 0), unsigned(w, 1), unsigned(w, 2), unsigned(w, 3)], x) }
}

/// Two rows' sums of halves to sums of groups: lanes 0..8 the first row's, in order of [`place`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn join(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xDD>(a, b))
}

/// A superblock of four rows, two in each of the first sums.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn groups<D: Decode>(w: [*const D; ROWS], x: &ActQ8, acc: &mut [__m512; ROWS]) {
    // SAFETY: as in column().
    unsafe {
        let order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 16, 18, 20, 22, 17, 19, 21, 23);
        let both = |a, b| _mm512_permutex2var_ps(_mm512_castps256_ps512(a), order, _mm512_castps256_ps512(b));
        let d = Avx::load_f32(x.d.as_ptr());
        let d = both(d, d);
        let above = if offset::<D>() == 0 {
            _mm512_setzero_si512()
        } else {
            let sums = dots([_mm512_set1_epi8(offset::<D>() as i8); 4], x);
            join(sums, sums)
        };
        let sums = if D::MIN {
            let sums = I::load(x.sums.as_ptr());
            let even = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            _mm512_add_ps(_mm512_permutexvar_ps(even, sums), _mm512_permutexvar_ps(odd, sums))
        } else {
            _mm512_setzero_ps()
        };
        for (pair, acc) in acc.iter_mut().enumerate().take(ROWS / 2) {
            let (a, b) = (w[2 * pair], w[2 * pair + 1]);
            let dots = _mm512_sub_epi32(join(row_dots(a, x), row_dots(b, x)), above);
            let ((scale_a, min_a), (scale_b, min_b)) = (D::eight::<I>(a), D::eight::<I>(b));
            *acc = I::fma(_mm512_cvtepi32_ps(dots), I::mul(both(scale_a, scale_b), d), *acc);
            if D::MIN {
                *acc = I::fnma(both(min_a, min_b), sums, *acc);
            }
        }
    }
}

/// A superblock of four rows, each in sums of its own.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn halves<D: Decode>(w: [*const D; ROWS], x: &ActQ8, acc: &mut [__m512; ROWS]) {
    // SAFETY: as in column().
    unsafe {
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let group = _mm512_srli_epi32::<1>(order);
        let d = _mm512_permutexvar_ps(group, _mm512_castps256_ps512(Avx::load_f32(x.d.as_ptr())));
        let above = if offset::<D>() == 0 {
            _mm512_setzero_si512()
        } else {
            dots([_mm512_set1_epi8(offset::<D>() as i8); 4], x)
        };
        let sums = _mm512_permutexvar_ps(order, I::load(x.sums.as_ptr()));
        for (w, acc) in w.into_iter().zip(acc) {
            let dots = _mm512_sub_epi32(row_dots(w, x), above);
            let (scale, min) = D::scales::<I>(w);
            *acc = I::fma(_mm512_cvtepi32_ps(dots), I::mul(_mm512_permutexvar_ps(order, scale), d), *acc);
            if D::MIN {
                *acc = I::fnma(_mm512_permutexvar_ps(order, min), sums, *acc);
            }
        }
    }
}

/// Rows that are decoded together, and superblocks in all of them, at most: with a tile they share the first-level cache.
const ROWS_MAX: usize = 8;
const SUPERS_MAX: usize = 64;
/// Bytes of tiles that all rows are multiplied with before the next tiles: they stay in the second-level cache.
const PANEL_BYTES: usize = 768 << 10;

/// Decoded superblocks, row by row, and each row's sums with one tile, by [`place`].
#[repr(C, align(64))]
struct Rows {
    qs: [[u8; QK_K]; SUPERS_MAX],
    scale: [[f32; 16]; SUPERS_MAX],
    min: [[f32; 16]; SUPERS_MAX],
    sums: [[[f32; ACT_TILE]; 16]; ROWS_MAX],
}

/// Tiles of a panel, for columns of `supers` superblocks.
pub(super) fn panel(supers: usize) -> usize {
    (PANEL_BYTES / (supers * size_of::<ActTile>())).max(1)
}

/// Matrix times tiles of 16 columns; `out` is `(rows, columns)`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn products<D: Decode>(w: &[D], n: usize, x: &[ActTile], columns: usize, out: &mut [f32]) {
    let (supers, per_row) = (act_blocks(n), n / (D::GROUPS * 32));
    let rows = w.len() / per_row;
    let block = (SUPERS_MAX / supers).clamp(1, ROWS_MAX);
    let chunk = supers.min(SUPERS_MAX);
    let panel = panel(supers);
    let mut space = Rows {
        qs: [[0; QK_K]; SUPERS_MAX],
        scale: [[0.0; 16]; SUPERS_MAX],
        min: [[0.0; 16]; SUPERS_MAX],
        sums: [[[0.0; ACT_TILE]; 16]; ROWS_MAX],
    };
    for (p, x) in x.chunks(panel * supers).enumerate() {
        for first in (0..rows).step_by(block) {
            let count = block.min(rows - first);
            let w = &w[first * per_row..][..count * per_row];
            for (t, x) in x.chunks_exact(supers).enumerate() {
                space.sums[..count].as_flattened_mut().iter_mut().for_each(|s| *s = [0.0; ACT_TILE]);
                let c = (p * panel + t) * ACT_TILE;
                let live = columns.min(c + ACT_TILE) - c;
                // SAFETY: the caller enabled the instructions. A mask of `live` lanes keeps to out's slice.
                unsafe {
                    for from in (0..supers).step_by(chunk) {
                        let to = supers.min(from + chunk);
                        if t == 0 || chunk < supers {
                            decode::<D>(w, per_row, from..to, &mut space);
                        }
                        multiply::<D>(count, &x[from..to], n / 32 - from * 8, &mut space);
                    }
                    for (r, sums) in space.sums[..count].iter().enumerate() {
                        let out = &mut out[(first + r) * columns + c..][..live];
                        _mm512_mask_storeu_ps(out.as_mut_ptr(), u16::MAX >> (ACT_TILE - live), fold::<D>(sums));
                    }
                }
            }
        }
    }
}

/// Adds one row's sums pairwise, as [`column`] does.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn fold<D: Decode>(sums: &[[f32; ACT_TILE]]) -> __m512 {
    // SAFETY: the caller enabled the instructions.
    unsafe {
        // Loops throughout: closures given to core's functions would not know of the instructions.
        let mut lanes = [_mm512_setzero_ps(); 16];
        for (l, s) in lanes.iter_mut().zip(sums) {
            *l = I::load(s.as_ptr());
        }
        let mut n = if D::HALVES { 8 } else { 4 };
        while n > 0 {
            for i in 0..n {
                lanes[i] = _mm512_add_ps(lanes[i], lanes[i + n]);
            }
            n /= 2;
        }
        lanes[0]
    }
}

/// Superblocks `supers` of each row to unsigned bytes, scales and minima.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn decode<D: Decode>(w: &[D], per_row: usize, supers: core::ops::Range<usize>, to: &mut Rows) {
    let mut copy = [D::zeroed(); 8];
    for (r, row) in w.chunks_exact(per_row).enumerate() {
        for s in supers.clone() {
            let w = superblock(row, s * (8 / D::GROUPS), &mut copy);
            let at = r * supers.len() + s - supers.start;
            let (scale, min) = (to.scale[at].as_mut_ptr(), to.min[at].as_mut_ptr());
            // SAFETY: the caller enabled the instructions; w is a superblock; stores keep to the fields' rows.
            unsafe {
                for (p, qs) in to.qs[at].as_chunks_mut::<64>().0.iter_mut().enumerate() {
                    _mm512_store_si512(qs.as_mut_ptr().cast(), unsigned(w, p));
                }
                if D::HALVES {
                    let (scales, mins) = D::scales::<I>(w);
                    I::store(scale, scales);
                    I::store(min, mins);
                } else {
                    let (scales, mins) = D::eight::<I>(w);
                    _mm256_store_ps(scale, scales);
                    _mm256_store_ps(min, mins);
                }
            }
        }
    }
}

/// Adds the products of decoded superblocks with one tile to the sums. `groups` are left of the rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn multiply<D: Decode>(rows: usize, x: &[ActTile], groups: usize, space: &mut Rows) {
    // Parts of a group, and quads of quants in each.
    let (parts, quads) = if D::HALVES { (2, 4) } else { (1, 8) };
    assert!(rows <= ROWS_MAX && rows * x.len() <= SUPERS_MAX);
    for (s, tile) in x.iter().enumerate() {
        for i in 0..8.min(groups - s * 8) * parts {
            let (g, place) = (i / parts, place::<D>(i));
            // SAFETY: the caller enabled the instructions; superblock r * x.len() + s is below SUPERS_MAX by the assertion,
            // and i < 8 * parts keeps quads and parts inside theirs.
            unsafe {
                let mut q = [_mm512_setzero_si512(); 8];
                for (j, q) in q[..quads].iter_mut().enumerate() {
                    *q = _mm512_loadu_si512(tile.qs.as_ptr().add(i * quads + j).cast());
                }
                let d = tile.scales(g);
                let sums = if D::HALVES { I::load(tile.sums[i].as_ptr()) } else { tile.group_sums(g) };
                let mut below = _mm512_setzero_si512();
                if offset::<D>() != 0 {
                    for q in &q[..quads] {
                        below = _mm512_dpbusd_epi32(below, _mm512_set1_epi8(offset::<D>() as i8), *q);
                    }
                    below = _mm512_sub_epi32(_mm512_setzero_si512(), below);
                }
                for r in 0..rows {
                    let at = r * x.len() + s;
                    let w = space.qs.as_ptr().add(at).cast::<i32>().add(i * quads);
                    let mut dots = below;
                    for (j, q) in q[..quads].iter().enumerate() {
                        dots = _mm512_dpbusd_epi32(dots, _mm512_set1_epi32(*w.add(j)), *q);
                    }
                    let scale = _mm512_mul_ps(I::splat(space.scale.get_unchecked(at)[i]), d);
                    let sum = space.sums.get_unchecked_mut(r)[place].as_mut_ptr();
                    let mut y = I::fma(_mm512_cvtepi32_ps(dots), scale, I::load(sum));
                    if D::MIN {
                        y = I::fnma(I::splat(space.min.get_unchecked(at)[i]), sums, y);
                    }
                    I::store(sum, y);
                }
            }
        }
    }
}
