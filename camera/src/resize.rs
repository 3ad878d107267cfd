//! Resizes a picture to its crops, with the same bytes as the reference: torchvision's antialiased bicubic on uint8.
//!
//! Relies on `forerun-engine` for the sizes. Keeps a few rows between its two passes, never a whole intermediate picture.

use crate::picture::{PictureError, Rgb, reserved, zeroed};
use forerun_engine::slicing::CropPlan;

/// The crops of `picture` in the order of [`CropPlan::crops`]: the thumbnail, then the slices row by row. Only `thumbnail`,
/// `grid` and `slice` of `plan` are used.
///
/// # Errors
/// If `picture` is not `width * height` pixels, or there is no memory for the crops.
pub fn crops(picture: &Rgb, plan: &CropPlan) -> Result<Vec<Rgb>, PictureError> {
    picture.check()?;
    let (rows, cols) = plan.grid.unwrap_or((0, 0));
    let mut crops = vec![empty(plan.thumbnail)?];
    for _ in 0..rows * cols {
        crops.push(empty(plan.slice)?);
    }
    resize(picture, plan.thumbnail, |_, row| crops[0].pixels.extend_from_slice(row))?;
    if plan.grid.is_some() {
        // The refined picture exists one row at a time: each is dealt out to the slices it crosses.
        let (width, height) = plan.slice;
        resize(picture, (width * cols, height * rows), |y, row| {
            let first = 1 + (y / height * cols) as usize;
            for (slice, part) in crops[first..].iter_mut().zip(row.chunks_exact(width as usize * 3)) {
                slice.pixels.extend_from_slice(part);
            }
        })?;
    }
    Ok(crops)
}

/// A picture whose rows are still to come.
fn empty((width, height): (u32, u32)) -> Result<Rgb, PictureError> {
    Ok(Rgb { width, height, pixels: reserved(u64::from(width) * u64::from(height) * 3)? })
}

/// Calls `emit(y, row)` for each row of `picture` resized to `(width, height)`, from the top.
///
/// Along each row first, then along columns, both rounded to bytes: the order and the roundings are torch's.
fn resize(picture: &Rgb, (width, height): (u32, u32), mut emit: impl FnMut(u32, &[u8])) -> Result<(), PictureError> {
    let along_rows = Taps::new(picture.width, width);
    let along_cols = Taps::new(picture.height, height);
    let row_bytes = width as usize * 3;
    // Row y of the picture, resized to `width`, is kept at y % window until no output row reaches up to it.
    let window = along_cols.window;
    let mut kept = zeroed((row_bytes * window) as u64)?;
    let mut out = zeroed(row_bytes as u64)?;
    let mut next = 0;
    for y in 0..height {
        let (start, weights) = along_cols.at(y as usize);
        for source in next.max(start)..start + weights.len() {
            let row = &picture.pixels[source * picture.width as usize * 3..][..picture.width as usize * 3];
            filter_row(row, &along_rows, &mut kept[source % window * row_bytes..][..row_bytes]);
        }
        next = next.max(start + weights.len());
        filter_rows(&kept, start, weights, along_cols.precision, &mut out);
        emit(y, &out);
    }
    Ok(())
}

/// Source samples and weights of every output sample along one axis.
struct Taps {
    /// Weights are multiples of 2^-precision.
    precision: u32,
    /// Most source samples of one output sample.
    window: usize,
    /// First source sample and number of source samples.
    spans: Vec<(usize, usize)>,
    /// (outputs, window); the tail of each row beyond its span is not used.
    weights: Vec<i16>,
}

impl Taps {
    /// Keys' cubic with a = -0.5, stretched by the factor when it shrinks, in f64 and then 16-bit fixed point: the
    /// precision is the highest at which the largest weight fits (torch, `UpSampleKernel.cpp`, uint8 with antialias).
    fn new(source: u32, target: u32) -> Self {
        let scale = f64::from(source) / f64::from(target);
        let stretch = scale.max(1.0);
        let support = 2.0 * stretch;
        let window = support.ceil() as usize * 2 + 1;
        let mut spans = Vec::with_capacity(target as usize);
        let mut exact = vec![0.0; target as usize * window];
        let mut largest = 0.0f64;
        for (i, weights) in exact.chunks_exact_mut(window).enumerate() {
            let center = scale * (i as f64 + 0.5);
            // Casts truncate and saturate at 0, as wanted.
            let start = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(source as usize);
            let count = end.saturating_sub(start).min(window);
            let mut sum = 0.0;
            for (j, weight) in weights[..count].iter_mut().enumerate() {
                *weight = keys((j as f64 + start as f64 - center + 0.5) * (1.0 / stretch));
                sum += *weight;
            }
            for weight in &mut weights[..count] {
                *weight /= sum;
                largest = largest.max(*weight);
            }
            spans.push((start, count));
        }
        let overflows = |bits: &u32| 0.5 + largest * f64::from(2u32 << bits) >= 32768.0;
        let precision = (0..22).find(overflows).unwrap_or(22);
        let one = f64::from(1u32 << precision);
        // Rounds half away from zero; the cast saturates, and the precision leaves room.
        let weights = exact.iter().map(|w| (w * one).round() as i16).collect();
        Self { precision, window, spans, weights }
    }

    fn at(&self, output: usize) -> (usize, &[i16]) {
        let (start, count) = self.spans[output];
        (start, &self.weights[output * self.window..][..count])
    }
}

/// Keys' cubic convolution kernel, a = -0.5.
fn keys(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((x - 5.0) * x + 8.0) * x * A - 4.0 * A
    } else {
        0.0
    }
}

/// The byte for a sum of weighted samples that began at half a unit.
fn to_byte(sum: i32, precision: u32) -> u8 {
    (sum >> precision).clamp(0, 255) as u8
}

/// Resizes one row of RGB pixels.
fn filter_row(row: &[u8], taps: &Taps, out: &mut [u8]) {
    let half = (1 << taps.precision) >> 1;
    let pixels = row.as_chunks::<3>().0;
    for (x, out) in out.as_chunks_mut::<3>().0.iter_mut().enumerate() {
        let (start, weights) = taps.at(x);
        let mut sums = [half; 3];
        for (pixel, weight) in pixels[start..start + weights.len()].iter().zip(weights) {
            for c in 0..3 {
                sums[c] += i32::from(pixel[c]) * i32::from(*weight);
            }
        }
        *out = sums.map(|s| to_byte(s, taps.precision));
    }
}

/// One output row from the rows `start..` of the picture, kept in the ring `kept` at their number modulo its rows.
fn filter_rows(kept: &[u8], start: usize, weights: &[i16], precision: u32, out: &mut [u8]) {
    /// Sums that stay in vector registers.
    const LANES: usize = 32;
    let half = (1 << precision) >> 1;
    let row_bytes = out.len();
    let window = kept.len() / row_bytes.max(1);
    for (block, out) in out.chunks_mut(LANES).enumerate() {
        let mut sums = [half; LANES];
        for (i, weight) in weights.iter().enumerate() {
            let row = &kept[(start + i) % window * row_bytes + block * LANES..][..out.len()];
            if let Some(row) = row.first_chunk::<LANES>() {
                for lane in 0..LANES {
                    sums[lane] += i32::from(row[lane]) * i32::from(*weight);
                }
            } else {
                for (sum, sample) in sums.iter_mut().zip(row) {
                    *sum += i32::from(*sample) * i32::from(*weight);
                }
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = to_byte(sum, precision);
        }
    }
}
