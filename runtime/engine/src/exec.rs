//! One place that spreads kernels over the workers. Pieces are cut by shape alone.

use crate::ports::Workers;
use crate::weights::Matrix;
use forerun_kernels::{ACT_TILE, ActQ8, Columns, KernelSet, act_blocks, act_columns, wants_q8};

/// Multiplications that are worth a second thread.
const SHARE_WORK: usize = 1 << 15;
/// Weights of a piece when there is enough for all threads: long runs of memory read faster.
const PIECE_MIN: usize = 1 << 17;
/// Most weights of a piece: what the last thread is still at when the others are done.
const PIECE_MAX: usize = 1 << 20;
/// Pieces for each thread, between these bounds, so that a faster one takes more of them.
const PIECES_PER_THREAD: usize = 4;

/// f32 elements that the int8 twin of `columns` times `n` activations takes.
pub(crate) const fn q8_words(columns: usize, n: usize) -> usize {
    act_columns(columns) * act_blocks(n) * (size_of::<ActQ8>() / 4)
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

/// A matrix with its bytes, and the column it is multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    pub w: Matrix,
    pub bytes: &'a [u8],
    pub x: Columns<'a>,
}

/// Rows in a piece of `rows` rows that have `weights` weights in all, for `columns` columns.
fn rows_per_piece(rows: usize, weights: usize, columns: usize, threads: usize) -> usize {
    let pieces = if weights < threads * PIECE_MIN {
        (weights * columns / SHARE_WORK).clamp(1, threads)
    } else {
        let share = (weights / (threads * PIECES_PER_THREAD)).clamp(PIECE_MIN, PIECE_MAX);
        (weights / share).next_multiple_of(threads)
    };
    rows.div_ceil(pieces).next_multiple_of(8)
}

impl Exec<'_> {
    /// Calls `f(t, row)` for every row of `width` elements in `out`.
    pub fn each_row(&self, out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
        self.workers.split(out, width, &f);
    }

    /// int8 twin of `x` `(columns, n)` in `space`.
    pub fn quantize<'q>(&self, x: &[f32], n: usize, space: &'q mut [f32]) -> &'q [ActQ8] {
        let space = &mut space[..q8_words(x.len() / n, n)];
        let tile = ACT_TILE * n;
        self.workers.split(space, q8_words(ACT_TILE, n), &|i, piece| {
            let x = &x[i * tile..x.len().min((i + 1) * tile)];
            (self.ks.quantize_act)(x, n, bytemuck::cast_slice_mut(piece));
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
        let out = &mut out[..w.rows * columns];
        if columns == 1 {
            return self.rows(w, bytes, x, out);
        }
        let turned = &mut turned[..w.rows * columns];
        self.rows(w, bytes, x, turned);
        self.turn(turned, w.rows, out);
    }

    /// `out[r, c] = Σ_j w[r, j] x[c, j]`: a product before it is turned.
    pub fn rows(&self, w: &Matrix, bytes: &[u8], x: Columns<'_>, out: &mut [f32]) {
        let columns = x.count();
        let row_bytes = w.row_bytes();
        let rows = rows_per_piece(w.rows, w.rows * w.cols, columns, self.workers.threads());
        self.workers.split(out, rows * columns, &|i, piece| {
            let count = piece.len() / columns;
            (self.ks.matmul)(w.block, &bytes[i * rows * row_bytes..][..count * row_bytes], x, piece);
        });
    }

    /// `out` `(columns, rows)` = `turned` `(rows, columns)`.
    pub fn turn(&self, turned: &[f32], rows: usize, out: &mut [f32]) {
        let columns = turned.len() / rows;
        // Sixteen columns at a time, sixteen rows of them: whole cache lines on both sides.
        self.workers.split(out, 16 * rows, &|i, out| {
            for first in (0..rows).step_by(16) {
                for (c, row) in out.chunks_exact_mut(rows).enumerate() {
                    let from = &turned[first * columns + 16 * i + c..];
                    for (o, x) in row[first..rows.min(first + 16)].iter_mut().zip(from.iter().step_by(columns)) {
                        *o = *x;
                    }
                }
            }
        });
    }

    /// Results of `parts`, one below the other, as one job: threads meet once, and read on from matrix to matrix.
    pub fn stacked(&self, parts: &[Part<'_>], out: &mut [f32]) {
        let (total, weights) = parts.iter().fold((0, 0), |(r, w), p| (r + p.w.rows, w + p.w.rows * p.w.cols));
        let rows = rows_per_piece(total, weights, 1, self.workers.threads());
        self.workers.split(&mut out[..total], rows, &|i, mut piece| {
            // First row of the piece, counted from the part at hand.
            let mut first = i * rows;
            for p in parts {
                if first >= p.w.rows {
                    first -= p.w.rows;
                    continue;
                }
                let (now, rest) = piece.split_at_mut(piece.len().min(p.w.rows - first));
                let row_bytes = p.w.row_bytes();
                (self.ks.matmul)(p.w.block, &p.bytes[first * row_bytes..][..now.len() * row_bytes], p.x, now);
                (first, piece) = (0, rest);
                if piece.is_empty() {
                    return;
                }
            }
        });
    }

    /// [`Exec::matmul`] of several matrices with the same activations.
    pub fn together<const N: usize>(
        &self,
        matrices: [&Matrix; N],
        resident: &[u8],
        x: &[f32],
        p: &mut Products<'_>,
        outs: [&mut [f32]; N],
    ) {
        let n = matrices[0].cols;
        let q8 = if matrices.iter().any(|w| wants_q8(w.block)) { self.quantize(x, n, p.q8) } else { &[] };
        let x = Columns { f32: x, q8, n };
        let total: usize = matrices.iter().map(|w| w.rows).sum();
        if x.count() > 1 || total > p.turned.len() {
            for (w, out) in matrices.iter().zip(outs) {
                self.product(w, w.bytes(resident), x, p.turned, out);
            }
            return;
        }
        self.stacked(&matrices.map(|w| Part { w: *w, bytes: w.bytes(resident), x }), p.turned);
        let mut stack = &*p.turned;
        for (w, out) in matrices.iter().zip(outs) {
            let (now, rest) = stack.split_at(w.rows);
            out[..w.rows].copy_from_slice(now);
            stack = rest;
        }
    }
}
