//! How a picture becomes crops: the size of its thumbnail, the grid of its slices, the visual tokens they cost.
//!
//! The arithmetic is that of transformers' `MiniCPMV4_6ImageProcessor` (which 4.7 uses), in f64 and with its roundings.
//! Relies on nothing but the sizes; never sees a pixel and allocates nothing.

use core::{fmt, iter};

/// Longest side over shortest side of a picture or slice, at most. The reference has no limit; without one a picture of
/// 20000 × 3 pixels becomes a crop of 9,520 patches, and the vision scratch is taken before any picture is seen.
pub const ASPECT_MAX: u32 = 100;
/// Largest [`SliceParams::max_slices`].
pub const MAX_SLICES_MAX: u32 = 64;
/// Largest [`SliceParams::scale_resolution`], in pixels.
pub const SCALE_RESOLUTION_MAX: u32 = 2048;
/// Largest [`SliceParams::patch_size`], in pixels.
pub const PATCH_SIZE_MAX: u32 = 64;

/// How many patches one visual token stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Detail {
    /// 4 × 4 patches a token.
    X16,
    /// 2 × 2 patches a token.
    X4,
}

impl Detail {
    /// Patches along one side of a visual token's square. Sides of every crop are multiples of it.
    pub const fn merge(self) -> u32 {
        match self {
            Self::X16 => 4,
            Self::X4 => 2,
        }
    }

    /// The name `downsample_mode` has in model files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::X16 => "16x",
            Self::X4 => "4x",
        }
    }

    /// The detail called `name`: `16x` or `4x`.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::X16, Self::X4].into_iter().find(|d| d.name() == name)
    }
}

/// What the model's processor says about slicing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceParams {
    /// Side of a square with about the area of every crop, in pixels: 448 in the published models.
    pub scale_resolution: u32,
    /// Side of a patch, in pixels: 14 in the published models.
    pub patch_size: u32,
    /// Most slices besides the thumbnail; 0 and 1 mean none. The published models say 9, and 1 for video frames.
    pub max_slices: u32,
}

/// The crops of one picture. Pixel sizes are `(width, height)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CropPlan {
    /// The whole picture is resized to this, always.
    pub thumbnail: (u32, u32),
    /// `(rows, cols)` of the slices, if the picture is large enough for slices.
    pub grid: Option<(u32, u32)>,
    /// The picture is resized to this and cut by `grid`; `(0, 0)` without a grid.
    pub refined: (u32, u32),
    /// Each slice; `(0, 0)` without a grid.
    pub slice: (u32, u32),
    /// [`SliceParams::patch_size`], in pixels.
    pub patch_size: u32,
    /// Patches a token.
    pub detail: Detail,
}

/// One crop as the vision tower sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crop {
    /// Patches from top to bottom, a multiple of [`Detail::merge`].
    pub rows: u32,
    /// Patches from left to right, a multiple of [`Detail::merge`].
    pub cols: u32,
    /// Visual tokens it becomes.
    pub tokens: u32,
}

impl CropPlan {
    /// The thumbnail, then the slices row by row: the order in which their tokens stand in the prompt.
    pub fn crops(&self) -> impl Iterator<Item = Crop> + use<> {
        let (rows, cols) = self.grid.unwrap_or((0, 0));
        let slices = (rows * cols) as usize; // at most MAX_SLICES_MAX
        iter::once(self.crop(self.thumbnail)).chain(iter::repeat_n(self.crop(self.slice), slices))
    }

    /// Visual tokens of all crops, without the markers around them.
    pub fn tokens(&self) -> u32 {
        self.crops().map(|c| c.tokens).sum()
    }

    fn crop(&self, (width, height): (u32, u32)) -> Crop {
        let (rows, cols) = (height / self.patch_size, width / self.patch_size);
        Crop { rows, cols, tokens: rows * cols / (self.detail.merge() * self.detail.merge()) }
    }
}

/// Why a picture has no crops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SliceError {
    /// A side is 0.
    Empty {
        /// Pixels.
        width: u32,
        /// Pixels.
        height: u32,
    },
    /// The longest side is more than [`ASPECT_MAX`] times the shortest.
    Narrow {
        /// Pixels.
        width: u32,
        /// Pixels.
        height: u32,
    },
    /// A field of [`SliceParams`] is out of range.
    Param {
        /// The field.
        name: &'static str,
        /// Its value.
        found: u32,
        /// Smallest value accepted.
        min: u32,
        /// Largest value accepted.
        max: u32,
    },
}

impl fmt::Display for SliceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Empty { width, height } => {
                write!(f, "picture of {width} x {height} pixels: expected at least 1 x 1: check its source")
            }
            Self::Narrow { width, height } => write!(
                f,
                "picture of {width} x {height} pixels: expected sides of at most 1 to {ASPECT_MAX}: cut it into pieces"
            ),
            Self::Param { name, found, min, max } => {
                write!(f, "{name}: found {found}, expected {min} to {max}: correct the setting or pack the model again")
            }
        }
    }
}

impl core::error::Error for SliceError {}

/// Sizes of the crops of a picture of `width` × `height` pixels.
///
/// # Errors
/// If a side is 0, the picture is longer than [`ASPECT_MAX`] to 1, or `params` is out of range.
pub fn plan(width: u32, height: u32, params: &SliceParams, detail: Detail) -> Result<CropPlan, SliceError> {
    params.check(detail)?;
    if width == 0 || height == 0 {
        return Err(SliceError::Empty { width, height });
    }
    let narrow = SliceError::Narrow { width, height };
    let (scale, align) = (f64::from(params.scale_resolution), params.patch_size * detail.merge());
    let (w, h) = (f64::from(width), f64::from(height));

    let thumbnail = best(w, h, scale, align).ok_or(narrow)?;
    let mut plan =
        CropPlan { thumbnail, grid: None, refined: (0, 0), slice: (0, 0), patch_size: params.patch_size, detail };
    if let Some((rows, cols)) = grid(width, height, params) {
        let (refined_w, refined_h) = (round_to(w, cols), round_to(h, rows));
        let slice_w = f64::from(refined_w) / f64::from(cols);
        let slice_h = f64::from(refined_h) / f64::from(rows);
        plan.slice = best(slice_w, slice_h, scale, align).ok_or(narrow)?;
        plan.refined = (plan.slice.0 * cols, plan.slice.1 * rows);
        plan.grid = Some((rows, cols));
    }
    Ok(plan)
}

/// Most patches that any crop of any picture can have: what the vision scratch must hold. 1,376 for the published models
/// in 16x, 1,288 in 4x, where a square crop has 1,024.
///
/// # Errors
/// If `params` is out of range.
pub fn crop_patches_max(params: &SliceParams, detail: Detail) -> Result<u32, SliceError> {
    params.check(detail)?;
    let (scale, align) = (params.scale_resolution, params.patch_size * detail.merge());
    // `best` yields a short side s = 0..=scale and a long side of at most scale² / s, whichever side it truncates first;
    // the aspect limits the long side too (s + 1, since s is truncated).
    let area = |short: u32| {
        let long = (scale * scale / short.max(1)).min(ASPECT_MAX * (short + 1));
        round_to(f64::from(short), align) / params.patch_size * (round_to(f64::from(long), align) / params.patch_size)
    };
    Ok((0..=scale).map(area).max().unwrap_or(0))
}

impl SliceParams {
    /// Ranges that keep every product here inside 32 bits.
    fn check(&self, detail: Detail) -> Result<(), SliceError> {
        let within = |name, found, min, max| {
            if (min..=max).contains(&found) { Ok(()) } else { Err(SliceError::Param { name, found, min, max }) }
        };
        within("patch_size", self.patch_size, 1, PATCH_SIZE_MAX)?;
        // A smaller square than one token's would leave no choice of sizes.
        let scale_min = self.patch_size * detail.merge();
        within("scale_resolution", self.scale_resolution, scale_min, SCALE_RESOLUTION_MAX)?;
        within("max_slice_nums", self.max_slices, 0, MAX_SLICES_MAX)
    }
}

/// The multiple of `unit` nearest to `length`, at least `unit`; halves go to the even multiple, as Python's `round`.
fn round_to(length: f64, unit: u32) -> u32 {
    let units = libm::roundeven(length / f64::from(unit)) as u32;
    units.saturating_mul(unit).max(unit)
}

/// `(width, height)` of about `scale`² pixels with the aspect of `width` : `height`, sides multiples of `align`; `None`
/// beyond [`ASPECT_MAX`]. The reference keeps smaller pictures as they are, but never calls for that here: without
/// slices it asks to upscale, and with slices the picture is larger than `scale`².
fn best(width: f64, height: f64, scale: f64, align: u32) -> Option<(u32, u32)> {
    if width.max(height) > width.min(height) * f64::from(ASPECT_MAX) {
        return None;
    }
    let aspect = width / height;
    let height = libm::trunc(scale / libm::sqrt(aspect));
    let width = libm::trunc(height * aspect);
    Some((round_to(width, align), round_to(height, align)))
}

/// `(rows, cols)` whose aspect is nearest to the picture's, among grids of about as many slices as its area holds
/// squares of `scale_resolution`; `None` if it holds one.
fn grid(width: u32, height: u32, params: &SliceParams) -> Option<(u32, u32)> {
    let area = u64::from(width) * u64::from(height);
    let square = u64::from(params.scale_resolution).pow(2);
    // The cast is exact: at most MAX_SLICES_MAX.
    let count = area.div_ceil(square).min(u64::from(params.max_slices)) as u32;
    if count <= 1 {
        return None;
    }
    let log_aspect = ln(f64::from(width) / f64::from(height));
    let (mut best, mut best_error) = ((1, 1), f64::INFINITY);
    for slices in (count - 1).max(2)..=(count + 1).min(params.max_slices) {
        for rows in (1..=slices).filter(|r| slices.is_multiple_of(*r)) {
            let cols = slices / rows;
            let error = libm::fabs(log_aspect - ln(f64::from(cols) / f64::from(rows)));
            if error < best_error || (error == best_error && rows > best.0) {
                (best, best_error) = ((rows, cols), error);
            }
        }
    }
    Some(best)
}

/// Natural logarithm of a positive normal `x`, within 0.51 ulp. `libm::log` is within 1 ulp, which turns grids round:
/// for a square picture 3 × 4 and 4 × 3 differ in the last bit only, because 4/3 is rounded and 3/4 is not.
fn ln(x: f64) -> f64 {
    // ln 2 in two parts; the first has so many trailing zeros that its product with an exponent is exact.
    const LN2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let (mut m, mut exponent) = libm::frexp(x);
    if m < core::f64::consts::FRAC_1_SQRT_2 {
        (m, exponent) = (m * 2.0, exponent - 1);
    }
    // ln m = 2 artanh z, z = (m - 1) / (m + 1), kept as z + z_low; |z| < 0.172.
    let (num, den) = (m - 1.0, m + 1.0);
    let den_low = m - (den - 1.0);
    let z = num / den;
    let z_low = (libm::fma(-z, den, num) - z * den_low) / den;
    let square = z * z;
    // artanh z - z, by Horner; the term left out is below 2^-70 of the result.
    let tail = (1..=13).rev().fold(0.0, |sum, i| (sum + 1.0 / f64::from(2 * i + 1)) * square) * z;

    let (k, two_z) = (f64::from(exponent), 2.0 * z);
    let high = k * LN2_HIGH + two_z;
    // |k ln 2| > |2z| unless k = 0, when nothing is lost: the rounding error of `high` is exact.
    let lost = if exponent == 0 { 0.0 } else { two_z - (high - k * LN2_HIGH) };
    high + (lost + (k * LN2_LOW + 2.0 * (z_low + tail)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REAL: SliceParams = SliceParams { scale_resolution: 448, patch_size: 14, max_slices: 9 };
    const TINY: SliceParams = SliceParams { scale_resolution: 112, ..REAL };
    use Detail::{X4, X16};

    type Grid = Option<(u32, u32)>;
    /// (input w×h, max, detail, grid rows × cols, thumbnail h×w, its tokens, refined h×w, slice h×w, its tokens, total
    /// with two markers a crop and a newline between rows), computed from the reference's formulas in Python.
    #[rustfmt::skip]
    #[allow(clippy::type_complexity)]
    const GOLDEN: [((u32, u32), u32, Detail, Grid, (u32, u32), u32, (u32, u32), (u32, u32), u32, u32); 16] = [
        ((448, 448), 9, X16, None, (448, 448), 64, (0, 0), (0, 0), 0, 66),
        ((28, 28), 9, X16, None, (448, 448), 64, (0, 0), (0, 0), 0, 66),
        ((100, 100), 9, X16, None, (448, 448), 64, (0, 0), (0, 0), 0, 66),
        ((640, 480), 9, X16, Some((1, 2)), (392, 504), 63, (560, 784), (560, 392), 70, 209),
        ((600, 600), 9, X16, Some((2, 1)), (448, 448), 64, (672, 616), (336, 616), 66, 203),
        ((1024, 768), 9, X16, Some((2, 2)), (392, 504), 63, (784, 1008), (392, 504), 63, 326),
        ((1920, 1080), 9, X16, Some((2, 4)), (336, 616), 66, (896, 1792), (448, 448), 64, 597),
        ((1080, 1920), 9, X16, Some((4, 2)), (616, 336), 66, (1792, 896), (448, 448), 64, 599),
        ((3000, 500), 9, X16, Some((1, 7)), (168, 1120), 60, (504, 2744), (504, 392), 63, 517),
        ((2480, 3508), 9, X16, Some((4, 2)), (560, 392), 70, (1568, 1008), (392, 504), 63, 595),
        ((2480, 3508), 36, X16, Some((7, 5)), (560, 392), 70, (3136, 2240), (448, 448), 64, 2388),
        ((4000, 3000), 9, X16, Some((3, 3)), (392, 504), 63, (1176, 1512), (392, 504), 63, 652),
        ((56, 1000), 9, X16, None, (1904, 112), 68, (0, 0), (0, 0), 0, 70),
        ((1920, 1080), 9, X4, Some((2, 4)), (336, 588), 252, (952, 1680), (476, 420), 255, 2311),
        ((640, 480), 9, X4, Some((1, 2)), (392, 504), 252, (560, 728), (560, 364), 260, 778),
        ((1920, 1080), 1, X16, None, (336, 616), 66, (0, 0), (0, 0), 0, 68),
    ];

    #[test]
    fn sizes_are_the_references() {
        let flip = |(h, w): (u32, u32)| (w, h);
        for (size, max_slices, detail, grid, thumbnail, tokens, refined, slice, slice_tokens, total) in GOLDEN {
            let p = plan(size.0, size.1, &SliceParams { max_slices, ..REAL }, detail).unwrap();
            assert_eq!(p.grid, grid, "{size:?}");
            assert_eq!(p.thumbnail, flip(thumbnail), "{size:?}");
            assert_eq!(p.refined, flip(refined), "{size:?}");
            assert_eq!(p.slice, flip(slice), "{size:?}");
            let mut crops = p.crops();
            let first = crops.next().unwrap();
            assert_eq!((first.rows * 14, first.cols * 14, first.tokens), (thumbnail.0, thumbnail.1, tokens));
            let (rows, cols) = grid.unwrap_or((0, 0));
            assert_eq!(p.crops().count() as u32, 1 + rows * cols);
            for c in crops {
                assert_eq!((c.rows * 14, c.cols * 14, c.tokens), (slice.0, slice.1, slice_tokens));
            }
            assert_eq!(p.tokens() + 2 * (1 + rows * cols) + rows.saturating_sub(1), total, "{size:?}");
        }
    }

    #[test]
    fn near_ties_fall_as_in_the_reference() {
        // Python's choices where two grids differ by rounding only.
        for (w, h, scale, max_slices, grid) in [
            (384, 384, 112, 36, (3, 4)),
            (1440, 1440, 448, 36, (3, 4)),
            (1080, 540, 112, 64, (6, 8)),
            (1152, 384, 112, 36, (3, 12)),
        ] {
            let params = SliceParams { scale_resolution: scale, max_slices, ..REAL };
            assert_eq!(plan(w, h, &params, X16).unwrap().grid, Some(grid), "{w} x {h}");
        }
    }

    #[test]
    fn extreme_shapes_are_small_or_refused() {
        assert_eq!(plan(1, 1, &REAL, X16).unwrap().thumbnail, (448, 448));
        for (w, h) in [(20000, 3), (3, 20000), (1, 100_000), (u32::MAX, 1), (101, 1), (1, 101)] {
            assert_eq!(plan(w, h, &REAL, X16), Err(SliceError::Narrow { width: w, height: h }));
        }
        for (w, h) in [(0, 0), (0, 5), (5, 0)] {
            assert_eq!(plan(w, h, &REAL, X16), Err(SliceError::Empty { width: w, height: h }));
        }
        let p = plan(u32::MAX, u32::MAX, &REAL, X16).unwrap();
        assert_eq!((p.grid, p.thumbnail, p.refined), (Some((3, 3)), (448, 448), (1344, 1344)));
        assert_eq!(plan(100, 1, &REAL, X16).unwrap().thumbnail, (4424, 56)); // 44 × 4400 before rounding
    }

    #[test]
    fn no_crop_exceeds_the_bound_and_one_reaches_it() {
        let sides = || (1..=200).chain((201..3000).step_by(37)).chain([4096, 9999, 65535]);
        for (params, detail, bound) in [(REAL, X16, 1376), (REAL, X4, 1288), (TINY, X16, 320), (TINY, X4, 164)] {
            assert_eq!(crop_patches_max(&params, detail), Ok(bound));
            let mut most = 0;
            for max_slices in [1, 2, 3, 9, 36, 64] {
                let params = SliceParams { max_slices, ..params };
                for (w, h) in sides().flat_map(|w| sides().map(move |h| (w, h))) {
                    if let Ok(p) = plan(w, h, &params, detail) {
                        most = p.crops().map(|c| c.rows * c.cols).max().unwrap().max(most);
                    } else {
                        assert!(w.max(h) > 100 * w.min(h), "{w} x {h} refused");
                    }
                }
            }
            assert!(most <= bound, "a crop of {most} patches, bound {bound}");
            assert!(most * 10 >= bound * 9, "bound {bound} is loose: largest crop {most}");
        }
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        let refused = |p: SliceParams| {
            assert!(crop_patches_max(&p, X16).is_err());
            matches!(plan(640, 480, &p, X16), Err(SliceError::Param { .. }))
        };
        for v in [0, 65, u32::MAX] {
            assert!(refused(SliceParams { patch_size: v, ..REAL }), "{v}");
        }
        for v in [0, 55, 2049, u32::MAX] {
            assert!(refused(SliceParams { scale_resolution: v, ..REAL }), "{v}");
        }
        assert!(refused(SliceParams { max_slices: 65, ..REAL }));
        assert!(plan(640, 480, &SliceParams { max_slices: 0, ..REAL }, X16).unwrap().grid.is_none());
        // The largest settings: no product overflows.
        let largest = SliceParams { scale_resolution: 2048, patch_size: 1, max_slices: 64 };
        assert!(plan(u32::MAX, u32::MAX, &largest, X16).unwrap().tokens() > 0);
        assert!(crop_patches_max(&largest, X4).unwrap() >= 2048 * 2048);
    }

    #[test]
    fn details_have_names() {
        for d in [X16, X4] {
            assert_eq!(Detail::parse(d.name()), Some(d));
        }
        assert_eq!(Detail::parse("8x"), None);
    }
}
