//! Positions of every prompt token for M-RoPE: three streams (T, H, W), one-dimensional for text, and on a canvas for
//! pictures as MiniCPM-V 4.7 was trained.
//!
//! Follows `MiniCPMV4_7Model.get_rope_index` of transformers 5.24 in effect. Relies on crop grids that fit the
//! placeholders; where they do not it refuses and never falls back to sequential positions, which would only lose
//! quality in silence.

use crate::config::TokenIds;
use alloc::vec::Vec;
use core::fmt;

/// What a token stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum TokenType {
    /// Text, and the markers around crops.
    Text = 0,
    /// Placeholder of one visual token of an image.
    Image = 1,
    /// Placeholder of one visual token of a video frame.
    Video = 2,
}

/// The type of each of `ids`.
pub fn token_types(ids: &[u32], tokens: &TokenIds) -> Vec<TokenType> {
    ids.iter()
        .map(|&id| match id {
            _ if id == tokens.image => TokenType::Image,
            _ if id == tokens.video => TokenType::Video,
            _ => TokenType::Text,
        })
        .collect()
}

/// Whether `id` is one of the five markers, which belong to the frame of a picture rather than to text.
fn is_marker(id: u32, t: &TokenIds) -> bool {
    [t.image_start, t.image_end, t.slice_start, t.slice_end, t.newline].contains(&id)
}

/// Positions of a prompt of `n` tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Positions {
    /// Time stream, `[n]`. Constant inside a picture, so it does not identify a token: order and causality go by index.
    pub t: Vec<u32>,
    /// Row stream, `[n]`.
    pub h: Vec<u32>,
    /// Column stream, `[n]`.
    pub w: Vec<u32>,
    /// A token generated at index `i >= n` has T = H = W = `i + delta`. Mostly negative after pictures.
    pub delta: i64,
}

impl Positions {
    fn sequential(n: u32) -> Self {
        let t: Vec<u32> = (0..n).collect();
        Self { h: t.clone(), w: t.clone(), t, delta: 0 }
    }

    fn set(&mut self, at: usize, t: u32, h: u32, w: u32) {
        (self.t[at], self.h[at], self.w[at]) = (t, h, w);
    }
}

/// Why a prompt has no positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PositionError {
    /// Token ids and token types differ in number.
    Types {
        /// Token ids.
        ids: usize,
        /// Token types.
        types: usize,
    },
    /// Runs of placeholders and crop grids differ in number.
    Crops {
        /// Runs of placeholders in the prompt.
        found: usize,
        /// Crop grids given.
        expected: usize,
    },
    /// A run of placeholders is not as long as its crop has visual tokens.
    Tokens {
        /// Which crop, from 0.
        crop: usize,
        /// Placeholders in the run.
        found: usize,
        /// Visual tokens of the crop.
        expected: u64,
    },
    /// A crop's sides are not multiples of the merge factor.
    Grid {
        /// Which crop, from 0.
        crop: usize,
        /// Its sides (rows, columns), in patches.
        grid: (u32, u32),
        /// The merge factor.
        merge: u32,
    },
    /// A picture's placeholders do not follow `<image>`.
    Start {
        /// Which crop, from 0.
        crop: usize,
        /// Index of its first placeholder.
        at: usize,
    },
    /// Positions would not fit 32 bits.
    TooLong,
}

impl fmt::Display for PositionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Types { ids, types } => write!(f, "found {types} token types, expected {ids}, one for each token"),
            Self::Crops { found, expected } => write!(
                f,
                "found {found} runs of picture placeholders in the prompt, expected {expected}, one for each crop: build \
                 the prompt and the crops from the same pictures"
            ),
            Self::Tokens { crop, found, expected } => write!(
                f,
                "crop {crop}: found {found} placeholders, expected {expected}: use one detail mode (4x or 16x) for prompt \
                 and vision"
            ),
            Self::Grid { crop, grid: (h, w), merge } => write!(
                f,
                "crop {crop}: found {h}x{w} patches, expected positive multiples of {merge}: use one detail mode (4x or \
                 16x) for prompt and vision"
            ),
            Self::Start { crop, at } => {
                write!(f, "crop {crop}: its placeholders begin at token {at}, expected the marker <image> before them")
            }
            Self::TooLong => f.write_str("the prompt's positions do not fit 32 bits: shorten it"),
        }
    }
}

impl core::error::Error for PositionError {}

/// A run of equal placeholders: one crop.
struct Crop {
    /// First placeholder.
    start: usize,
    /// One past the last placeholder.
    end: usize,
    /// Rows of visual tokens.
    rows: u32,
    /// Columns of visual tokens.
    cols: u32,
}

/// A thumbnail and its slices.
struct Frame {
    /// Index of `<image>`.
    start: usize,
    /// One past the last token: all markers after the last crop belong to the frame.
    end: usize,
    /// Index of the thumbnail among the crops.
    crop: usize,
    /// Number of slices; they are the crops after the thumbnail.
    slices: usize,
}

/// Computes the positions of a prompt.
///
/// * `ids`, `types`: the tokens, `[n]`; see [`token_types`].
/// * `grids`: sides of each crop (rows, columns) in patches, in the order of the prompt, thumbnails before their slices.
/// * `merge`: patches along the side of a visual token: 4 in 16x mode, 2 in 4x mode.
/// * `canvas`: [`crate::config::ImageConfig::canvas`]; if false all positions are sequential (MiniCPM-V 4.6), after the same checks.
///
/// # Errors
/// If grids and placeholders do not fit, or a picture does not begin with `<image>`.
pub fn positions(
    ids: &[u32],
    types: &[TokenType],
    grids: &[(u32, u32)],
    merge: u32,
    tokens: &TokenIds,
    canvas: bool,
) -> Result<Positions, PositionError> {
    if ids.len() != types.len() {
        return Err(PositionError::Types { ids: ids.len(), types: types.len() });
    }
    let n = u32::try_from(ids.len()).map_err(|_| PositionError::TooLong)?;
    let crops = crops(types, grids, merge)?;
    let mut out = Positions::sequential(n);
    if !canvas || crops.is_empty() {
        return Ok(out);
    }

    let mut pos = 0;
    let mut at = 0;
    for frame in frames(ids, &crops, tokens)? {
        // Between frames of one group nothing is left: the first one's end has swallowed the second one's <image>.
        while at < frame.start {
            out.set(at, pos, pos, pos);
            pos += 1;
            at += 1;
        }
        pos = lay_out(&mut out, pos, &frame, &crops)?;
        at = frame.end;
    }
    while at < ids.len() {
        out.set(at, pos, pos, pos);
        pos += 1;
        at += 1;
    }
    let max = [&out.t, &out.h, &out.w].into_iter().flatten().max().copied().unwrap_or(0);
    out.delta = i64::from(max) + 1 - i64::from(n);
    Ok(out)
}

/// Finds the runs of placeholders and checks each against its grid.
fn crops(types: &[TokenType], grids: &[(u32, u32)], merge: u32) -> Result<Vec<Crop>, PositionError> {
    let mut crops = Vec::new();
    let mut found = 0;
    let mut start = 0;
    for run in types.chunk_by(|a, b| a == b) {
        let end = start + run.len();
        if run[0] != TokenType::Text {
            if let Some(&grid) = grids.get(found) {
                crops.push(check_crop(found, start, end, grid, merge)?);
            }
            found += 1;
        }
        start = end;
    }
    if found != grids.len() {
        return Err(PositionError::Crops { found, expected: grids.len() });
    }
    Ok(crops)
}

fn check_crop(crop: usize, start: usize, end: usize, grid: (u32, u32), merge: u32) -> Result<Crop, PositionError> {
    let side = |patches: u32| patches.checked_rem(merge).filter(|&r| r == 0 && patches > 0).map(|_| patches / merge);
    let (Some(rows), Some(cols)) = (side(grid.0), side(grid.1)) else {
        return Err(PositionError::Grid { crop, grid, merge });
    };
    let expected = u64::from(rows) * u64::from(cols);
    if expected != (end - start) as u64 {
        return Err(PositionError::Tokens { crop, found: end - start, expected });
    }
    Ok(Crop { start, end, rows, cols })
}

/// Joins crops to frames. A crop after `<slice>` is a slice of the frame before it, any other one a thumbnail.
fn frames(ids: &[u32], crops: &[Crop], tokens: &TokenIds) -> Result<Vec<Frame>, PositionError> {
    let mut frames: Vec<Frame> = Vec::new();
    for (i, crop) in crops.iter().enumerate() {
        let before = crop.start.checked_sub(1);
        let end = crop.end + ids[crop.end..].iter().take_while(|&&id| is_marker(id, tokens)).count();
        match (before.map(|b| ids[b]), frames.last_mut()) {
            (Some(id), Some(frame)) if id == tokens.slice_start => {
                frame.slices += 1;
                frame.end = end;
            }
            (Some(id), _) if id == tokens.image_start => {
                frames.push(Frame { start: crop.start - 1, end, crop: i, slices: 0 });
            }
            _ => return Err(PositionError::Start { crop: i, at: crop.start }),
        }
    }
    Ok(frames)
}

/// Places one frame with its origin at `o`; returns the next free position.
fn lay_out(out: &mut Positions, o: u32, frame: &Frame, crops: &[Crop]) -> Result<u32, PositionError> {
    let thumb = &crops[frame.crop];
    let slices = &crops[frame.crop + 1..][..frame.slices];
    let columns = columns(slices);
    let (canvas_h, canvas_w, slice_h, slice_w) = match slices.first() {
        None => (u64::from(thumb.rows), u64::from(thumb.cols), 0, 0),
        Some(s) => {
            let rows = slices.len() / columns;
            (rows as u64 * u64::from(s.rows), columns as u64 * u64::from(s.cols), s.rows, s.cols)
        }
    };
    // No position up to the next frame exceeds this: a slice larger than the first one, and text, add at most one for
    // each token of the prompt.
    let reach = u64::from(o) + canvas_h.max(canvas_w) + out.t.len() as u64 + 1;
    if reach > u64::from(u32::MAX) {
        return Err(PositionError::TooLong);
    }
    let (canvas_h, canvas_w) = (canvas_h as u32, canvas_w as u32);

    for at in frame.start..frame.end {
        out.set(at, o, o, o);
    }
    let halo = o.saturating_sub(1);
    out.set(frame.start, o, halo, halo);
    if thumb.end < frame.end {
        out.set(thumb.end, o, o + canvas_h, o + canvas_w);
    }
    for r in 0..thumb.rows {
        for c in 0..thumb.cols {
            let at = thumb.start + (r * thumb.cols + c) as usize;
            out.set(at, o, o + spread(canvas_h, thumb.rows, r), o + spread(canvas_w, thumb.cols, c));
        }
    }
    for (k, s) in slices.iter().enumerate() {
        let (row, col) = ((k / columns) as u32, (k % columns) as u32);
        let (top, left) = (o + row * slice_h, o + col * slice_w);
        out.set(s.start - 1, o, top, left);
        for r in 0..s.rows {
            for c in 0..s.cols {
                out.set(s.start + (r * s.cols + c) as usize, o, top + r, left + c);
            }
        }
        if s.end < frame.end {
            out.set(s.end, o, top + s.rows - 1, left + s.cols - 1);
        }
        if let Some(next) = slices.get(k + 1) {
            // The newline that ends a row of slices sits at the right edge of the canvas.
            for at in s.end + 1..next.start - 1 {
                out.set(at, o, o + (row + 1) * slice_h - 1, o + canvas_w);
            }
        }
    }
    Ok(o + canvas_h.max(canvas_w) + 1)
}

/// Slices in a row: those before the first gap wider than `</slice><slice>`; all if they do not fill whole rows.
fn columns(slices: &[Crop]) -> usize {
    let n = slices.len();
    let first = slices.windows(2).position(|s| s[1].start - s[0].end > 2).map_or(n, |i| i + 1);
    if n.checked_rem(first) == Some(0) { first } else { n.max(1) }
}

/// `round(linspace(0, extent - 1, steps)[i])` in f32 with ties to even, as torch computes it: from both ends.
fn spread(extent: u32, steps: u32, i: u32) -> u32 {
    if steps <= 1 {
        return 0;
    }
    let last = extent.saturating_sub(1) as f32;
    let step = last / (steps - 1) as f32;
    let x = if i < steps / 2 { step * i as f32 } else { last - step * (steps - 1 - i) as f32 };
    libm::rintf(x) as u32
}

#[cfg(test)]
mod tests;
