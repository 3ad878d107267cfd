//! Reads a PNG, JPEG or WebP file into RGB pixels, as transformers does through Pillow: EXIF orientation applied,
//! everything converted to 8-bit RGB, alpha dropped.
//!
//! Relies on the `image` crate's decoders. Never decodes before the size in the header is found acceptable, and never
//! returns part of a picture: a file that ends early is an error.

use image::{ColorType, DynamicImage, ImageDecoder, ImageFormat, ImageReader, RgbImage};
use std::io::Cursor;

/// An 8-bit RGB picture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rgb {
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// Rows from the top, `(height, width, 3)`.
    pub pixels: Vec<u8>,
}

/// What a picture may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most pixels. While it decodes, a picture takes up to 11 bytes a pixel: 8 as a 16-bit RGBA PNG or as the coefficients
    /// of a progressive JPEG, and 3 as RGB.
    pub pixels_max: u64,
}

impl Default for Limits {
    /// 64 megapixels.
    fn default() -> Self {
        Self { pixels_max: 64 << 20 }
    }
}

/// Why there is no picture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PictureError {
    /// The first bytes are those of no format read here.
    #[error("not a picture this build reads (PNG, JPEG, WebP): convert it to one of them")]
    Format,
    /// The file ends before the picture does.
    #[error("the {format} ends early, after {bytes} bytes: copy it again")]
    Truncated {
        /// `PNG`, `JPEG` or `WebP`.
        format: &'static str,
        /// Bytes of the file.
        bytes: usize,
    },
    /// The decoder refused it.
    #[error("the {format} cannot be decoded ({reason}): copy it again, or save it as a plain PNG or JPEG")]
    Damaged {
        /// `PNG`, `JPEG` or `WebP`.
        format: &'static str,
        /// The decoder's words.
        reason: String,
    },
    /// More pixels than the limit.
    #[error("picture of {width} x {height} pixels: expected at most {pixels_max} pixels: make it smaller")]
    Large {
        /// Pixels.
        width: u32,
        /// Pixels.
        height: u32,
        /// [`Limits::pixels_max`].
        pixels_max: u64,
    },
    /// The machine has no memory for it.
    #[error("picture needs {bytes} bytes that are not free: make it smaller")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// [`Rgb::pixels`] is not `width * height * 3` long, or a side is 0.
    #[error("picture of {width} x {height} pixels: found {bytes} bytes, expected 3 for each of at least one pixel")]
    Shape {
        /// Pixels.
        width: u32,
        /// Pixels.
        height: u32,
        /// Bytes in [`Rgb::pixels`].
        bytes: usize,
    },
}

/// `(width, height)` of the picture in the file `bytes`, from its header: what [`Rgb::decode`] will need room for.
///
/// # Errors
/// If it is no PNG, JPEG or WebP, or the header is damaged.
pub fn dimensions(bytes: &[u8]) -> Result<(u32, u32), PictureError> {
    let (format, name) = match image::guess_format(bytes) {
        Ok(f @ ImageFormat::Png) => (f, "PNG"),
        Ok(f @ ImageFormat::Jpeg) => (f, "JPEG"),
        Ok(f @ ImageFormat::WebP) => (f, "WebP"),
        _ => return Err(PictureError::Format),
    };
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = image::Limits::no_limits();
    limits.max_alloc = Some(16 << 20);
    reader.limits(limits);
    reader.into_dimensions().map_err(|e| PictureError::Damaged { format: name, reason: e.to_string() })
}

impl Rgb {
    /// Decodes the file `bytes`: PNG, JPEG or WebP, of an animation the first frame.
    ///
    /// Samples of 16 bits keep their upper byte. Pillow does so too, except for 16-bit grey, which it clamps to 255
    /// without scaling: nearly white. Grey is scaled here as well.
    ///
    /// # Errors
    /// If it is none of these formats, ends early, is damaged, or exceeds `limits`.
    pub fn decode(bytes: &[u8], limits: Limits) -> Result<Self, PictureError> {
        let (format, name, whole) = match image::guess_format(bytes) {
            Ok(f @ ImageFormat::Png) => (f, "PNG", png_is_whole(bytes)),
            Ok(f @ ImageFormat::Jpeg) => (f, "JPEG", jpeg_is_whole(bytes)),
            Ok(f @ ImageFormat::WebP) => (f, "WebP", webp_is_whole(bytes)),
            _ => return Err(PictureError::Format),
        };
        if whole.is_none() {
            return Err(PictureError::Truncated { format: name, bytes: bytes.len() });
        }
        let damaged = |e: image::ImageError| PictureError::Damaged { format: name, reason: e.to_string() };

        let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
        let mut decoder_limits = image::Limits::no_limits();
        // Beside the pixels a decoder keeps tables, a colour profile and the like: 16 MiB are ample.
        decoder_limits.max_alloc = Some(limits.pixels_max.saturating_mul(8).saturating_add(16 << 20));
        reader.limits(decoder_limits);
        let mut decoder = reader.into_decoder().map_err(damaged)?;
        let (width, height) = decoder.dimensions();
        let count = u64::from(width) * u64::from(height);
        if count > limits.pixels_max {
            return Err(PictureError::Large { width, height, pixels_max: limits.pixels_max });
        }
        // An unreadable orientation is none, as in Pillow.
        let orientation = decoder.orientation().unwrap_or(image::metadata::Orientation::NoTransforms);
        let color = decoder.color_type();
        let mut raw = zeroed(decoder.total_bytes())?;
        decoder.read_image(&mut raw).map_err(damaged)?;

        let pixels = to_rgb(raw, color, count)?;
        let shape = PictureError::Shape { width, height, bytes: pixels.len() };
        let mut picture = DynamicImage::ImageRgb8(RgbImage::from_raw(width, height, pixels).ok_or(shape)?);
        picture.apply_orientation(orientation);
        let picture = picture.into_rgb8(); // moves: it is RGB already
        Ok(Self { width: picture.width(), height: picture.height(), pixels: picture.into_raw() })
    }

    /// That [`Rgb::pixels`] are as many as the sides say, and at least one.
    pub(crate) fn check(&self) -> Result<(), PictureError> {
        let (width, height, bytes) = (self.width, self.height, self.pixels.len());
        let expected = (u64::from(width) * u64::from(height)).checked_mul(3);
        if bytes == 0 || expected != Some(bytes as u64) {
            return Err(PictureError::Shape { width, height, bytes });
        }
        Ok(())
    }
}

/// An empty vector with room for `bytes`, or an error where `Vec::with_capacity` would abort.
pub(crate) fn reserved(bytes: u64) -> Result<Vec<u8>, PictureError> {
    let mut v = Vec::new();
    match usize::try_from(bytes).map(|n| v.try_reserve_exact(n)) {
        Ok(Ok(())) => Ok(v),
        _ => Err(PictureError::Memory { bytes }),
    }
}

/// `bytes` zeros.
pub(crate) fn zeroed(bytes: u64) -> Result<Vec<u8>, PictureError> {
    let mut v = reserved(bytes)?;
    v.resize(bytes as usize, 0); // fits: reserved above
    Ok(v)
}

/// RGB of `count` pixels from samples as decoders return them: 16-bit ones in this machine's byte order.
fn to_rgb(raw: Vec<u8>, color: ColorType, count: u64) -> Result<Vec<u8>, PictureError> {
    if color == ColorType::Rgb8 {
        return Ok(raw);
    }
    let channels = usize::from(color.channel_count());
    let pixel_bytes = usize::from(color.bytes_per_pixel());
    let sample_bytes = pixel_bytes / channels;
    let upper = if cfg!(target_endian = "little") { sample_bytes - 1 } else { 0 };
    // Grey (with alpha) has its one sample in all three places.
    let places = if channels < 3 { [0, 0, 0] } else { [0, 1, 2] };
    let mut rgb = zeroed(count.saturating_mul(3))?;
    for (out, pixel) in rgb.chunks_exact_mut(3).zip(raw.chunks_exact(pixel_bytes)) {
        for (o, place) in out.iter_mut().zip(places) {
            *o = pixel[place * sample_bytes + upper];
        }
    }
    Ok(rgb)
}

// The decoders fill up what is missing with grey or black, so the end of each file is looked for first. Each walk returns
// `None` if the bytes end before the picture does; it checks no contents.

/// A PNG is chunks up to `IEND`: length, name, data, checksum (PNG specification, 5.3).
fn png_is_whole(bytes: &[u8]) -> Option<()> {
    let mut rest = bytes.get(8..)?;
    loop {
        let (length, after) = rest.split_first_chunk()?;
        let end = after.starts_with(b"IEND");
        rest = after.get((u32::from_be_bytes(*length) as usize).checked_add(8)?..)?;
        if end {
            return Some(());
        }
    }
}

/// A JPEG is marker segments up to EOI; after SOS come coded bytes in which no marker but RST appears (ITU T.81, B.1.1).
fn jpeg_is_whole(bytes: &[u8]) -> Option<()> {
    let mut rest = bytes.get(2..)?;
    loop {
        let at = rest.iter().position(|b| *b == 0xff)?;
        rest = &rest[at + 1..];
        match *rest.first()? {
            0xff => {}                                      // fill byte: the marker comes later
            0x00 | 0x01 | 0xd0..=0xd8 => rest = &rest[1..], // coded 0xff, TEM, RST, SOI: no length
            0xd9 => return Some(()),
            _ => {
                let length = u16::from_be_bytes([*rest.get(1)?, *rest.get(2)?]);
                rest = rest.get(1 + usize::from(length)..)?;
            }
        }
    }
}

/// A WebP is a RIFF file: a length, then chunks of name, length and data padded to even (RFC 9649, 2.3).
fn webp_is_whole(bytes: &[u8]) -> Option<()> {
    let length = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?) as usize);
    let end = length(4)?.checked_add(8)?;
    let mut at = 12;
    while at < end {
        at = length(at + 4)?.checked_next_multiple_of(2)?.checked_add(at + 8)?;
    }
    // Encoders differ on whether the last pad byte is written.
    (end <= bytes.len() && at <= bytes.len() + 1).then_some(())
}
