//! AVX-512 VNNI with AMX for tiles of 16 columns: the integer products of 16 rows, 16 columns and a group of 32 are one
//! instruction. The sums are those of `tile`, in the same order, so the bits are the same.
//!
//! Instructions by assembly: Rust has no stable intrinsics for them. Intel SDM volume 1, chapter 18.

use super::avx512vnni::Avx512Vnni as I;
use super::tile::{self, ActTile, place};
use crate::lanes::{Decode, Isa};
use crate::{ACT_TILE, Columns, act_blocks};
use core::arch::asm;
use core::arch::x86_64::*;
use core::mem::MaybeUninit;

/// Rows of a tile register.
const ROWS: usize = 16;
/// Superblocks of a row, at most: longer rows go the way of `tile`.
const SUPERS_MAX: usize = 18;

/// Asks the kernel to let this process use the tile registers, whose state is large.
pub(super) fn permitted() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_int = 18;
        // SAFETY: takes two numbers and changes nothing but the permission.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Shapes of the tile registers, as LDTILECFG takes them: 0 products `(rows, columns)`, 1 weights `(rows, 32)`, 2 activations
/// `(8 quads, columns, 4)`.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}
static CONFIG: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 32, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
};
const _: () = assert!(size_of::<TileConfig>() == 64);

/// Tile products under way: what a tile store has not brought to the cache yet cannot be loaded.
const AHEAD: usize = 2;
/// Places for their results.
const DOTS: usize = 4;

/// Decoded rows, group by group; integer products; the sums of one tile's columns by [`place`].
#[repr(C, align(64))]
struct Space {
    qs: [[[[i8; 32]; ROWS]; SUPERS_MAX]; 8],
    scale: [[[f32; ROWS]; SUPERS_MAX]; 8],
    min: [[[f32; ROWS]; SUPERS_MAX]; 8],
    dots: [[[i32; ACT_TILE]; ROWS]; DOTS],
    sums: [[[f32; ACT_TILE]; 8]; ROWS],
}

/// As [`Isa::matrix`], with activations of `tile::quantize`.
///
/// # Safety
/// AVX-512 VNNI is enabled in the caller, AMX permitted; `scalar::check_matmul` accepted the arguments.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn matrix<D: Decode>(w: &[D], x: Columns<'_>, out: &mut [f32]) {
    let blocks = act_blocks(x.n);
    let (tiles, columns) = (tile::tiles(x.count()), x.count());
    // SAFETY: as in tile::matrix().
    unsafe {
        if D::HALVES || tiles == 0 || blocks > SUPERS_MAX {
            return tile::matrix(w, x, out);
        }
        products::<D>(w, x.n, bytemuck::cast_slice(&x.q8[..tiles * ACT_TILE * blocks]), columns, out);
        tile::loose(w, x, tiles * ACT_TILE, out);
    }
}

/// Matrix times tiles of 16 columns; `out` is `(rows, columns)`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn products<D: Decode>(w: &[D], n: usize, x: &[ActTile], columns: usize, out: &mut [f32]) {
    let (supers, per_row) = (act_blocks(n), n / (D::GROUPS * 32));
    let rows = w.len() / per_row;
    let mut space = MaybeUninit::<Space>::uninit();
    let space = space.as_mut_ptr();
    // SAFETY: the caller saw to it that the instructions may be used, and that supers <= SUPERS_MAX. decode() writes what
    // multiply() reads, and multiply() the sums of the groups that rows of n have; those of others are zeroed. A mask of
    // `live` lanes keeps to out's slice.
    unsafe {
        if n < 256 {
            (&raw mut (*space).sums).write_bytes(0, 1);
        }
        asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, preserves_flags, readonly));
        let panel = tile::panel(supers);
        for (p, x) in x.chunks(panel * supers).enumerate() {
            for first in (0..rows).step_by(ROWS) {
                decode::<D>(w, first, per_row, supers, space);
                let count = ROWS.min(rows - first);
                let c = p * panel * ACT_TILE;
                multiply::<D>(x, n / 32, space, |t, r, sum| {
                    let c = c + t * ACT_TILE;
                    let live = columns.min(c + ACT_TILE) - c;
                    if r < count {
                        let out = &mut out[(first + r) * columns + c..][..live];
                        _mm512_mask_storeu_ps(out.as_mut_ptr(), u16::MAX >> (ACT_TILE - live), sum);
                    }
                });
            }
        }
        asm!("tilerelease", options(nomem, nostack, preserves_flags), out("tmm0") _, out("tmm1") _, out("tmm2") _);
    }
}

/// Sixteen rows from `first` on to signed bytes, scales and minima; past the last row, that one once more.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn decode<D: Decode>(w: &[D], first: usize, per_row: usize, supers: usize, to: *mut Space) {
    let mut copy = [D::zeroed(); 8];
    for r in 0..ROWS {
        let row = &w[(first + r).min(w.len() / per_row - 1) * per_row..][..per_row];
        for s in 0..supers {
            let w = tile::superblock(row, s * (8 / D::GROUPS), &mut copy);
            // SAFETY: r < ROWS and s < supers <= SUPERS_MAX are inside the fields.
            unsafe {
                for p in 0..4 {
                    let bytes = _mm512_sub_epi8(tile::unsigned(w, p), _mm512_set1_epi8(tile::offset::<D>() as i8));
                    _mm256_store_si256((&raw mut (*to).qs[2 * p][s][r]).cast(), _mm512_castsi512_si256(bytes));
                    let high = _mm512_extracti64x4_epi64::<1>(bytes);
                    _mm256_store_si256((&raw mut (*to).qs[2 * p + 1][s][r]).cast(), high);
                }
                let (scale, min) = D::eight::<I>(w);
                let mut eight = [[0f32; 8]; 2];
                _mm256_storeu_ps(eight[0].as_mut_ptr(), scale);
                _mm256_storeu_ps(eight[1].as_mut_ptr(), min);
                for g in 0..8 {
                    (*to).scale[g][s][r] = eight[0][g];
                    (*to).min[g][s][r] = eight[1][g];
                }
            }
        }
    }
}

/// Integer products of 16 rows, 32 bytes each, with a group of 16 columns.
#[inline(always)]
unsafe fn dots(w: *const [[i8; 32]; ROWS], quads: *const i8, to: *mut [[i32; ACT_TILE]; ROWS]) {
    // SAFETY: the caller configured the tiles, whose shapes are those of the pointers.
    unsafe {
        asm!(
            "tileloadd tmm1, [{w} + {half}]",
            "tileloadd tmm2, [{quads} + {line}]",
            "tilezero tmm0",
            "tdpbssd tmm0, tmm1, tmm2",
            "tilestored [{to} + {line}], tmm0",
            w = in(reg) w, half = in(reg) 32usize, quads = in(reg) quads, line = in(reg) 64usize, to = in(reg) to,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, options(nostack, preserves_flags)
        );
    }
}

/// Which product of a panel: tile, group, superblock. In the order of computation.
#[derive(Clone, Copy)]
struct Step {
    t: usize,
    g: usize,
    s: usize,
}

impl Step {
    /// The next one, of columns with `groups` groups.
    fn next(self, groups: usize) -> Self {
        let Self { t, g, s } = self;
        if (s + 1) * 8 + g < groups {
            Self { t, g, s: s + 1 }
        } else if g + 1 < groups.min(8) {
            Self { t, g: g + 1, s: 0 }
        } else {
            Self { t: t + 1, g: 0, s: 0 }
        }
    }
}

/// Products of the decoded rows with the tiles `x`, of columns with `groups` groups; `put(tile, row, sums)` takes them.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn multiply<D: Decode>(
    x: &[ActTile],
    groups: usize,
    space: *mut Space,
    mut put: impl FnMut(usize, usize, __m512),
) {
    let supers = groups.div_ceil(8);
    let tiles = x.len() / supers;
    let mut step = Step { t: 0, g: 0, s: 0 };
    let mut issued = 0;
    let rows = space;
    // SAFETY: superblocks are below SUPERS_MAX, groups below 8 and rows below ROWS, as in the fields.
    unsafe {
        let mut issue = || {
            let Step { t, g, s } = step;
            if t < tiles {
                let to = &raw mut (*rows).dots[issued % DOTS];
                dots(&raw const (*rows).qs[g][s], x[t * supers + s].quads(g), to);
                (step, issued) = (step.next(groups), issued + 1);
            }
        };
        (0..AHEAD).for_each(|_| issue());
        let mut done = 0;
        for (t, x) in x.chunks_exact(supers).enumerate() {
            for g in 0..groups.min(8) {
                let mut acc = [_mm512_setzero_ps(); ROWS];
                for (s, tile) in x[..(groups - g).div_ceil(8)].iter().enumerate() {
                    issue();
                    let dots = &raw const (*space).dots[done % DOTS];
                    done += 1;
                    let (d, sums) = (tile.scales(g), tile.group_sums(g));
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let products = _mm512_cvtepi32_ps(_mm512_load_si512((&raw const (*dots)[r]).cast()));
                        let scale = _mm512_mul_ps(I::splat((*space).scale[g][s][r]), d);
                        *acc = I::fma(products, scale, *acc);
                        if D::MIN {
                            *acc = I::fnma(I::splat((*space).min[g][s][r]), sums, *acc);
                        }
                    }
                }
                for (r, acc) in acc.into_iter().enumerate() {
                    I::store((&raw mut (*space).sums[r][place::<D>(g)]).cast(), acc);
                }
            }
            for r in 0..ROWS {
                let sums = &raw const (*space).sums[r];
                put(t, r, tile::fold::<D>(&*sums));
            }
        }
    }
}
