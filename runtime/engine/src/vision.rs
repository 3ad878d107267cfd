//! The vision tower: patches, layers, window merger (16x), final merger. One crop at a time, since attention stays inside a
//! crop.

use crate::buffers::VisionScratch;
use crate::config::VisionConfig;
use crate::engine::{Engine, EngineError};
use crate::exec::{Exec, Products};
use crate::plan::VisionSizes;
use crate::ports::{ReadError, Storage};
use crate::slicing::Detail;
use crate::stream::{Feed, Stream};
use crate::weights::{Linear, Matrix, Norm, VisionLayer, VisionWeights, WindowMerger};
use forerun_kernels::{Columns, KvRows, dequantize_row, wants_q8};

/// One crop as 8-bit pixels.
#[derive(Debug, Clone, Copy)]
pub struct CropPixels<'a> {
    /// Patches from top to bottom.
    pub rows: usize,
    /// Patches from left to right.
    pub cols: usize,
    /// `(rows · patch, cols · patch, 3)`, red first.
    pub rgb: &'a [u8],
}

/// Hears the tower's intermediate values. Every method does nothing unless replaced.
pub trait VisionObserver {
    /// `(tokens, width)` after the stage called `name`: `embed`, `layer0`, `early_merger`, `post_layernorm`.
    fn stage(&mut self, name: &'static str, x: &[f32]) {
        let _ = (name, x);
    }
}

impl VisionObserver for crate::NoObserver {}

/// What a crop's kernels need, beside its scratch.
struct Tower<'e, 'a, S: Storage> {
    c: &'e VisionConfig,
    w: &'e VisionWeights,
    exec: Exec<'a>,
    feed: Feed<'e, S>,
}

impl<S: Storage> Engine<'_, S> {
    /// Encodes `crop` and appends its visual tokens to [`Engine::visual_features`]. Returns how many there are.
    ///
    /// # Errors
    /// If the crop does not fit the plan or its sides do not suit `detail`, the features do not fit the context, or the
    /// tower is streamed and cannot be read or, twice, differs from a checksum.
    pub fn see(
        &mut self,
        crop: CropPixels<'_>,
        detail: Detail,
        observer: &mut dyn VisionObserver,
    ) -> Result<usize, EngineError> {
        let (rows, cols) = (crop.rows, crop.cols);
        let refused = EngineError::Crop { rows, cols };
        let (Some((c, _)), Some(w)) = (&self.config.vision, &self.weights.vision) else { return Err(refused) };
        let m = detail.merge() as usize;
        let patches = rows.checked_mul(cols).ok_or(refused)?;
        let fits = patches > 0 && patches <= self.patches_max && rows.is_multiple_of(m) && cols.is_multiple_of(m);
        let mergeable = detail == Detail::X4 || w.window_merger.is_some();
        if !fits || !mergeable || crop.rgb.len() != patches * c.patch * c.patch * 3 {
            return Err(refused);
        }
        let tokens = patches / (m * m);
        let h = self.config.text.hidden;
        if self.features + tokens > self.context {
            return Err(EngineError::ContextFull { need: self.features + tokens, context: self.context });
        }
        let sizes = VisionSizes::new(c, h, self.patches_max);
        let with_merger = detail == Detail::X16;
        if self.window.is_some() {
            self.settle()?;
            let idle = self.moe.as_mut().is_none_or(|m| m.abandon(&mut self.storage));
            if !idle {
                return Err(EngineError::VisionRead { tensor: w.order[0].name, error: ReadError::TimedOut });
            }
        }
        // Once more if a checksum is wrong: the transfer may have gone wrong rather than the file.
        let mut tries = 2;
        loop {
            let feed = match &mut self.window {
                None => Feed::Resident(self.resident),
                Some(window) => {
                    let region = self.weights.resident_offset;
                    Feed::Streamed(Stream::new(&mut self.storage, window, w, region, with_merger))
                }
            };
            let mut s = VisionScratch::carve(self.state.work, &sizes);
            let out = &mut self.state.features[self.features * h..][..tokens * h];
            let mut tower = Tower { c, w, exec: self.exec, feed };
            let result = tower.run(crop, detail, &mut s, out, observer);
            let settled = self.settle();
            tries -= 1;
            match result {
                Err(EngineError::VisionChecksum { .. }) if tries > 0 => settled?,
                Err(e) => return Err(e),
                Ok(()) => break,
            }
        }
        self.features += tokens;
        self.crops += 1;
        Ok(tokens)
    }
}

impl<S: Storage> Tower<'_, '_, S> {
    fn run(
        &mut self,
        crop: CropPixels<'_>,
        detail: Detail,
        s: &mut VisionScratch<'_>,
        out: &mut [f32],
        observer: &mut dyn VisionObserver,
    ) -> Result<(), EngineError> {
        let (d, w) = (self.c.hidden, self.w);
        let (mut rows, mut cols) = (crop.rows, crop.cols);
        self.embed(crop, s)?;
        observer.stage("embed", &s.wide[0][..rows * cols * d]);
        for (l, layer) in w.layers.iter().enumerate() {
            self.layer(layer, rows * cols, s)?;
            if l == 0 {
                observer.stage("layer0", &s.wide[0][..rows * cols * d]);
            }
            if let (Detail::X16, Some(m)) = (detail, &w.window_merger)
                && self.c.insert_layer == Some(l)
            {
                self.merge_windows(m, rows, cols, s)?;
                (rows, cols) = (rows / 2, cols / 2);
                observer.stage("early_merger", &s.wide[0][..rows * cols * d]);
            }
        }
        let n = rows * cols;
        let [x, y, ..] = &mut s.wide;
        self.norm(&w.post_norm, &x[..n * d], &mut y[..n * d])?;
        observer.stage("post_layernorm", &y[..n * d]);
        // 2×2 blocks side by side, norm, MLP into the text model's width.
        let [x, y, z, ..] = &mut s.wide;
        windows(&y[..n * d], rows, cols, d, &mut x[..n * d]);
        self.norm(&w.merger_norm, &x[..n * d], &mut z[..n * d])?;
        let mut p = Products { turned: s.turned, q8: s.q8 };
        self.linear(&w.merger_fc1, &z[..n * d], &mut p, s.inner)?;
        let inner = &mut s.inner[..n * d];
        self.exec.each_row(inner, 4 * d, |_, row| (self.exec.ks.gelu_erf)(row));
        self.linear(&w.merger_fc2, inner, &mut p, out)
    }

    /// `out` `(columns, w.rows)` = `x` `(columns, w.cols)` times the matrix that comes next, as its rows arrive.
    fn product(&mut self, w: &Matrix, x: Columns<'_>, turned: &mut [f32], out: &mut [f32]) -> Result<(), EngineError> {
        let columns = x.count();
        let turned = &mut turned[..w.rows * columns];
        let mut done = 0;
        while done < w.rows {
            let (bytes, rows) = self.feed.rows(w)?;
            self.exec.rows(&Matrix { rows, ..*w }, bytes, x, &mut turned[done * columns..][..rows * columns]);
            done += rows;
        }
        self.exec.turn(turned, w.rows, &mut out[..w.rows * columns]);
        Ok(())
    }

    /// Adds a bias to every row of `x`.
    fn bias(&mut self, l: &Linear, x: &mut [f32]) -> Result<(), EngineError> {
        let bias = self.feed.vector(&l.b)?;
        self.exec.each_row(x, l.w.rows, |_, row| (self.exec.ks.axpy)(1.0, bias, row));
        Ok(())
    }

    /// `out` = `x` `(columns, l.w.cols)` through a linear layer.
    fn linear(&mut self, l: &Linear, x: &[f32], p: &mut Products<'_>, out: &mut [f32]) -> Result<(), EngineError> {
        let n = l.w.cols;
        let q8 = if wants_q8(l.w.block) { self.exec.quantize(x, n, p.q8) } else { &[] };
        let out = &mut out[..x.len() / n * l.w.rows];
        self.product(&l.w, Columns { f32: x, q8, n }, p.turned, out)?;
        self.bias(l, out)
    }

    /// `wide[0]` = patches · kernel + bias + position embedding, `(patches, hidden)`.
    fn embed(&mut self, crop: CropPixels<'_>, s: &mut VisionScratch<'_>) -> Result<(), EngineError> {
        let (c, d) = (self.c, self.c.hidden);
        let (rows, cols, side, values) = (crop.rows, crop.cols, c.patch, c.patch_values());
        let n = rows * cols;
        // Normalised values of every byte, for each channel: (byte / 255 - mean) / std, rounded as PyTorch does.
        let mut table = [[0f32; 256]; 3];
        for (ch, t) in table.iter_mut().enumerate() {
            for (b, v) in t.iter_mut().enumerate() {
                *v = (b as f32 * (1.0 / 255.0) - c.mean[ch]) / c.std[ch];
            }
        }
        self.exec.each_row(&mut s.patches[..n * values], values, |i, patch| {
            let (r, q) = (i / cols, i % cols);
            for ch in 0..3 {
                for y in 0..side {
                    let row = &crop.rgb[((r * side + y) * cols + q) * side * 3..][..side * 3];
                    for x in 0..side {
                        patch[(ch * side + y) * side + x] = table[ch][usize::from(row[x * 3 + ch])];
                    }
                }
            }
        });
        let mut p = Products { turned: s.turned, q8: s.q8 };
        let [x, position, ..] = &mut s.wide;
        self.linear(&self.w.patch, &s.patches[..n * values], &mut p, x)?;
        let (table, grid) = (&self.w.positions, c.position_side);
        let mut first = 0;
        while first < table.rows {
            let (bytes, count) = self.feed.rows(table)?;
            self.exec.workers.split2(n, &mut x[..n * d], d, &mut position[..n * d], d, &|i, x, row| {
                // The table cell under the patch's upper left corner.
                let at = (grid * (i / cols) / rows) * grid + grid * (i % cols) / cols;
                if (first..first + count).contains(&at) {
                    dequantize_row(table.block, &bytes[(at - first) * table.row_bytes()..][..table.row_bytes()], row);
                    (self.exec.ks.axpy)(1.0, row, x);
                }
            });
            first += count;
        }
        Ok(())
    }

    fn norm(&mut self, norm: &Norm, x: &[f32], y: &mut [f32]) -> Result<(), EngineError> {
        let (w, b) = self.feed.norm(norm)?;
        let n = w.len();
        self.exec.each_row(y, n, |t, row| (self.exec.ks.layer_norm)(row, &x[t * n..][..n], w, b, self.c.eps));
        Ok(())
    }

    /// `wide[0]` moves on by one pre-norm layer of `n` tokens.
    fn layer(&mut self, w: &VisionLayer, n: usize, s: &mut VisionScratch<'_>) -> Result<(), EngineError> {
        let d = self.c.hidden;
        {
            let [x, y, ..] = &mut s.wide;
            self.norm(&w.ln1, &x[..n * d], &mut y[..n * d])?;
        }
        self.attention([&w.q, &w.k, &w.v, &w.out], n, n, s)?;
        let [x, y, z, ..] = &mut s.wide;
        self.add(&mut x[..n * d], &z[..n * d]);
        self.norm(&w.ln2, &x[..n * d], &mut y[..n * d])?;
        let mut p = Products { turned: s.turned, q8: s.q8 };
        self.linear(&w.fc1, &y[..n * d], &mut p, s.inner)?;
        let wide = w.fc1.w.rows;
        let inner = &mut s.inner[..n * wide];
        self.exec.each_row(inner, wide, |_, row| (self.exec.ks.gelu_tanh)(row));
        self.linear(&w.fc2, inner, &mut p, z)?;
        self.add(&mut x[..n * d], &z[..n * d]);
        Ok(())
    }

    fn add(&self, x: &mut [f32], y: &[f32]) {
        let d = self.c.hidden;
        self.exec.each_row(x, d, |t, row| (self.exec.ks.axpy)(1.0, &y[t * d..][..d], row));
    }

    /// `wide[2]` = attention output of `wide[1]`, each token over the `group` consecutive tokens it belongs to.
    fn attention(
        &mut self,
        [q, k, v, out]: [&Linear; 4],
        n: usize,
        group: usize,
        s: &mut VisionScratch<'_>,
    ) -> Result<(), EngineError> {
        let (d, dim, heads) = (self.c.hidden, self.c.head_dim(), self.c.heads);
        let [_, x, y, queries, rows, keys, values, o] = &mut s.wide;
        let x = &x[..n * d];
        let integer = [q, k, v].into_iter().any(|l| wants_q8(l.w.block));
        let q8 = if integer { self.exec.quantize(x, d, s.q8) } else { &[] };
        let x = Columns { f32: x, q8, n: d };
        self.product(&q.w, x, s.turned, queries)?;
        self.bias(q, &mut queries[..n * d])?;
        // Keys and values by head: (heads, n, dim), so that a head's rows lie together.
        for (l, by_head) in [(k, &mut **keys), (v, &mut **values)] {
            self.product(&l.w, x, s.turned, rows)?;
            let (bias, rows) = (self.feed.vector(&l.b)?, &**rows);
            self.exec.each_row(&mut by_head[..n * d], n * dim, |head, o| {
                for (t, o) in o.chunks_exact_mut(dim).enumerate() {
                    o.copy_from_slice(&rows[t * d + head * dim..][..dim]);
                    (self.exec.ks.axpy)(1.0, &bias[head * dim..][..dim], o);
                }
            });
        }
        let scale = 1.0 / libm::sqrtf(dim as f32);
        let (queries, keys, values) = (&**queries, &**keys, &**values);
        if group == n {
            // Rows of tokens, each all heads: as many as the kernels take at a time.
            let rows = 64;
            self.exec.each_row(&mut o[..n * d], rows * d, |i, o| {
                for head in 0..heads {
                    // From this head's first element to its last.
                    let (from, len) = (head * dim, o.len() - d + dim);
                    let q = &queries[i * rows * d + from..][..len];
                    let (k, v) = (&keys[head * n * dim..][..n * dim], &values[head * n * dim..][..n * dim]);
                    (self.exec.ks.attention_rows)(q, k, v, dim, d, scale, &mut o[from..][..len]);
                }
            });
        } else {
            self.exec.each_row(&mut o[..n * d], dim, |i, o| {
                let (t, head) = (i / heads, i % heads);
                let at = (head * n + t / group * group) * dim;
                let (k, v) = (KvRows::F32(&keys[at..][..group * dim]), KvRows::F32(&values[at..][..group * dim]));
                (self.exec.ks.attention)(&queries[i * dim..][..dim], k, v, group, scale, o);
            });
        }
        self.linear(out, &o[..n * d], &mut Products { turned: s.turned, q8: s.q8 }, y)
    }

    /// Attention inside 2×2 windows, then each window becomes one token: MLP of its four, plus their mean.
    fn merge_windows(
        &mut self,
        w: &WindowMerger,
        rows: usize,
        cols: usize,
        s: &mut VisionScratch<'_>,
    ) -> Result<(), EngineError> {
        let d = self.c.hidden;
        let n = rows * cols;
        {
            let [x, y, ..] = &mut s.wide;
            windows(&x[..n * d], rows, cols, d, &mut y[..n * d]);
            x[..n * d].copy_from_slice(&y[..n * d]);
            self.norm(&w.ln1, &x[..n * d], &mut y[..n * d])?;
        }
        self.attention([&w.q, &w.k, &w.v, &w.out], n, 4, s)?;
        let [x, y, z, ..] = &mut s.wide;
        self.add(&mut x[..n * d], &z[..n * d]);
        self.norm(&w.pre_norm, &x[..n * d], &mut y[..n * d])?;
        let mut p = Products { turned: s.turned, q8: s.q8 };
        self.linear(&w.fc1, &y[..n * d], &mut p, s.inner)?;
        let wide = w.fc1.w.rows;
        let inner = &mut s.inner[..n / 4 * wide];
        self.exec.each_row(inner, wide, |_, row| (self.exec.ks.gelu_tanh)(row));
        self.linear(&w.fc2, inner, &mut p, z)?;
        y[..n * d].copy_from_slice(&x[..n * d]);
        let four = &*y;
        let merged = &*z;
        self.exec.each_row(&mut x[..n / 4 * d], d, |i, o| {
            let t = &four[i * 4 * d..][..4 * d];
            for j in 0..d {
                o[j] = merged[i * d + j] + (t[j] + t[d + j] + t[2 * d + j] + t[3 * d + j]) * 0.25;
            }
        });
        Ok(())
    }
}

/// Reorders `(rows, cols)` tokens so that the four of each 2×2 window stand together: windows row by row, inside a window
/// upper left, upper right, lower left, lower right.
fn windows(x: &[f32], rows: usize, cols: usize, d: usize, out: &mut [f32]) {
    for (i, o) in out.chunks_exact_mut(d).enumerate() {
        let (window, part) = (i / 4, i % 4);
        let r = window / (cols / 2) * 2 + part / 2;
        let c = window % (cols / 2) * 2 + part % 2;
        o.copy_from_slice(&x[(r * cols + c) * d..][..d]);
    }
    debug_assert_eq!(rows * cols * d, out.len());
}
