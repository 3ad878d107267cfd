//! One place that spreads kernels over the workers. Pieces are cut by shape alone.

use crate::ports::Workers;
use crate::weights::{Linear, Matrix};
use forerun_kernels::{ActQ8, Columns, KernelSet, act_blocks, wants_q8};

/// Multiplications below which cutting a matrix further costs more than it gains.
const PIECE_WORK: usize = 1 << 15;

/// f32 elements that the int8 twin of `n` activations takes.
pub(crate) const fn q8_words(n: usize) -> usize {
    act_blocks(n) * (size_of::<ActQ8>() / 4)
}

/// Kernels and threads.
#[derive(Clone, Copy)]
pub(crate) struct Exec<'a> {
    pub ks: &'static KernelSet,
    pub workers: &'a dyn Workers,
}

/// Buffers a product needs besides its result.
pub(crate) struct Products<'a> {
    /// `(rows, columns)` before it is turned, at least that long.
    pub turned: &'a mut [f32],
    /// int8 twin of the activations, [`q8_words`] for each column.
    pub q8: &'a mut [f32],
}

/// Rows in a piece of a `(rows, n)` matrix times `columns` columns.
pub(crate) fn rows_per_piece(n: usize, columns: usize) -> usize {
    (PIECE_WORK / (n * columns).max(1)).max(4)
}

impl Exec<'_> {
    /// Calls `f(t, row)` for every row of `width` elements in `out`.
    pub fn each_row(&self, out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
        self.workers.split(out, width, &f);
    }

    /// int8 twin of `x` `(columns, n)` in `space`.
    pub fn quantize<'q>(&self, x: &[f32], n: usize, space: &'q mut [f32]) -> &'q [ActQ8] {
        let space = &mut space[..x.len() / n * q8_words(n)];
        self.workers.split(space, q8_words(n), &|c, piece| {
            (self.ks.quantize_act)(&x[c * n..][..n], bytemuck::cast_slice_mut(piece));
        });
        bytemuck::cast_slice(space)
    }

    /// `out[c, r] = Σ_j w[r, j] x[c, j]`: `x` is `(columns, w.cols)`, `out` `(columns, w.rows)`.
    pub fn matmul(&self, w: &Matrix, bytes: &[u8], x: &[f32], p: &mut Products<'_>, out: &mut [f32]) {
        let n = w.cols;
        let q8 = if wants_q8(w.block) { self.quantize(x, n, p.q8) } else { &[] };
        self.product(w, bytes, Columns { f32: x, q8, n }, p.turned, out);
    }

    /// [`Exec::matmul`] of activations that have their int8 twin already.
    pub fn product(&self, w: &Matrix, bytes: &[u8], x: Columns<'_>, turned: &mut [f32], out: &mut [f32]) {
        let columns = x.count();
        let row_bytes = w.row_bytes();
        let rows = rows_per_piece(w.cols, columns);
        let run = |target: &mut [f32]| {
            self.workers.split(target, rows * columns, &|i, piece| {
                let count = piece.len() / columns;
                (self.ks.matmul)(w.block, &bytes[i * rows * row_bytes..][..count * row_bytes], x, piece);
            });
        };
        let out = &mut out[..w.rows * columns];
        if columns == 1 {
            return run(out);
        }
        let turned = &mut turned[..w.rows * columns];
        run(turned);
        self.each_row(out, w.rows, |c, row| {
            for (r, o) in row.iter_mut().enumerate() {
                *o = turned[r * columns + c];
            }
        });
    }

    /// [`Exec::matmul`] plus bias.
    pub fn linear(&self, l: &Linear, resident: &[u8], x: &[f32], p: &mut Products<'_>, out: &mut [f32]) {
        self.matmul(&l.w, l.w.bytes(resident), x, p, out);
        let bias = l.b.f32(resident);
        let columns = x.len() / l.w.cols;
        self.each_row(&mut out[..columns * l.w.rows], l.w.rows, |_, row| (self.ks.axpy)(1.0, bias, row));
    }
}
