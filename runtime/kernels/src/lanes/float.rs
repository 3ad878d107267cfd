//! Products of f32, f16 and bf16 matrices: tiles of rows and columns, so that what is loaded is used several times.

use super::isa::Isa;
use crate::Columns;
use forerun_format::BlockType;

/// How 16 weights are loaded.
trait Load {
    type T: Copy + Default;
    unsafe fn load<I: Isa>(p: *const Self::T) -> I::F;
}

struct F32;
struct F16;
struct Bf16;

impl Load for F32 {
    type T = f32;
    #[inline(always)]
    unsafe fn load<I: Isa>(p: *const f32) -> I::F {
        // SAFETY: passed on to the caller.
        unsafe { I::load(p) }
    }
}

impl Load for F16 {
    type T = u16;
    #[inline(always)]
    unsafe fn load<I: Isa>(p: *const u16) -> I::F {
        // SAFETY: passed on to the caller.
        unsafe { I::load_f16(p) }
    }
}

impl Load for Bf16 {
    type T = u16;
    #[inline(always)]
    unsafe fn load<I: Isa>(p: *const u16) -> I::F {
        // SAFETY: passed on to the caller.
        unsafe { I::load_bf16(p) }
    }
}

/// # Safety
/// I's instructions are enabled; `scalar::check_matmul` accepted the arguments.
#[inline(always)]
pub(super) unsafe fn matmul<I: Isa, const TILE: usize>(block: BlockType, w: &[u8], x: Columns<'_>, out: &mut [f32]) {
    // SAFETY: passed on; rows start on a multiple of their element's size, which cast_slice checks.
    unsafe {
        match block {
            BlockType::F32 => tiles::<I, F32, TILE>(bytemuck::cast_slice(w), x, out),
            BlockType::F16 => tiles::<I, F16, TILE>(bytemuck::cast_slice(w), x, out),
            _ => tiles::<I, Bf16, TILE>(bytemuck::cast_slice(w), x, out),
        }
    }
}

#[inline(always)]
unsafe fn tiles<I: Isa, L: Load, const TILE: usize>(w: &[L::T], x: Columns<'_>, out: &mut [f32]) {
    let (n, columns) = (x.n, x.count());
    let rows = w.len() / n;
    let mut c = 0;
    while c < columns {
        let wide = columns - c >= TILE;
        let mut r = 0;
        while r < rows {
            let tall = rows - r >= TILE;
            let (w, x, out) = (&w[r * n..], &x.f32[c * n..], &mut out[r * columns + c..]);
            // SAFETY: w has the tile's rows and x its columns of n elements from here on, by the two comparisons.
            unsafe {
                match (tall, wide) {
                    (true, true) => tile::<I, L, TILE, TILE>(w, x, n, columns, out),
                    (true, false) => tile::<I, L, TILE, 1>(w, x, n, columns, out),
                    (false, true) => tile::<I, L, 1, TILE>(w, x, n, columns, out),
                    (false, false) => tile::<I, L, 1, 1>(w, x, n, columns, out),
                }
            }
            r += if tall { TILE } else { 1 };
        }
        c += if wide { TILE } else { 1 };
    }
}

/// `R` rows times `C` columns. Each result is the sum of its own 16 lanes, whatever the tile.
#[inline(always)]
unsafe fn tile<I: Isa, L: Load, const R: usize, const C: usize>(
    w: &[L::T],
    x: &[f32],
    n: usize,
    stride: usize,
    out: &mut [f32],
) {
    assert!(w.len() >= R * n && x.len() >= C * n && out.len() > (R - 1) * stride + C - 1);
    let full = n / 16 * 16;
    // SAFETY: r < R, c < C and j + 16 <= n, so every load stays inside w and x, checked above.
    unsafe {
        // Plain loops: a closure here would be a function of its own, without the instructions its caller has.
        let mut acc = [[I::zero(); C]; R];
        let mut columns = [I::zero(); C];
        let mut j = 0;
        while j < full {
            for c in 0..C {
                columns[c] = I::load(x.as_ptr().add(c * n + j));
            }
            for r in 0..R {
                let row = L::load::<I>(w.as_ptr().add(r * n + j));
                for c in 0..C {
                    acc[r][c] = I::fma(row, columns[c], acc[r][c]);
                }
            }
            j += 16;
        }
        if full < n {
            // The rest of each row and column, filled up with zeros.
            for c in 0..C {
                let mut rest = [0f32; 16];
                rest[..n - full].copy_from_slice(&x[c * n + full..][..n - full]);
                columns[c] = I::load(rest.as_ptr());
            }
            for r in 0..R {
                let mut rest = [L::T::default(); 16];
                rest[..n - full].copy_from_slice(&w[r * n + full..][..n - full]);
                let row = L::load::<I>(rest.as_ptr());
                for c in 0..C {
                    acc[r][c] = I::fma(row, columns[c], acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                out[r * stride + c] = I::fold(acc[r][c]);
            }
        }
    }
}
