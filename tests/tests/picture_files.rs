//! Reading picture files: every kind of sample against Pillow's conversion, EXIF orientation, and damaged files.

use forerun_camera::picture::{Limits, PictureError, Rgb};
use forerun_camera::resize::crops;
use forerun_engine::slicing::{Detail, SliceParams, plan};
use image::ImageEncoder;
use image::codecs::jpeg::JpegEncoder;
use std::fs;
use std::path::PathBuf;

/// Most that a sample of a lossy file may differ from Pillow's, in 1/255: decoders round the inverse transform, the chroma
/// upsampling and the colour conversion differently.
const LOSSY_DIFF_MAX: u8 = 4;

fn decode(bytes: &[u8]) -> Result<Rgb, PictureError> {
    Rgb::decode(bytes, Limits::default())
}

/// The files of `tests/pictures`, by name.
fn fixtures() -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("pictures");
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|f| f.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| ["png", "jpg", "webp"].iter().any(|x| e == *x)))
        .map(|p| (p.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(p).unwrap()))
        .collect();
    files.sort();
    files
}

fn expected(name: &str) -> Rgb {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("pictures").join(format!("{name}.rgb"));
    let bytes = fs::read(path).unwrap();
    let line = bytes.iter().position(|b| *b == b'\n').unwrap();
    let mut sides = std::str::from_utf8(&bytes[..line]).unwrap().split(' ').map(|n| n.parse().unwrap());
    Rgb { width: sides.next().unwrap(), height: sides.next().unwrap(), pixels: bytes[line + 1..].to_vec() }
}

/// A small generator (PCG's multiplier), so that failures repeat.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}

#[test]
fn samples_are_converted_as_pillow_does() {
    let files = fixtures();
    assert_eq!(files.len(), 24);
    for (name, bytes) in files {
        let (found, expected) = (decode(&bytes).unwrap(), expected(&name));
        assert_eq!((found.width, found.height), (expected.width, expected.height), "{name}");
        let most = found.pixels.iter().zip(&expected.pixels).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
        let lossy = name.ends_with(".jpg") || name == "lossy.webp";
        assert!(most <= if lossy { LOSSY_DIFF_MAX } else { 0 }, "{name}: differs by {most}");
        println!("{name}: max {most}");
    }
}

/// A JPEG of 24 × 16 pixels in flat 8 × 8 blocks, which the quantization keeps, with an EXIF orientation.
fn jpeg(orientation: u16) -> Vec<u8> {
    let pixels: Vec<u8> = (0..16 * 24).flat_map(|i| block_color(i % 24 / 8, i / 24 / 8)).collect();
    let mut plain = Vec::new();
    JpegEncoder::new_with_quality(&mut plain, 100)
        .write_image(&pixels, 24, 16, image::ExtendedColorType::Rgb8)
        .unwrap();
    // APP1 with one TIFF directory entry: tag 0x0112, type SHORT, one value (EXIF 2.3, 4.6).
    let mut exif = b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01".to_vec();
    exif.extend(orientation.to_be_bytes());
    exif.extend([0; 6]);
    let mut out = vec![0xff, 0xd8, 0xff, 0xe1];
    out.extend((exif.len() as u16 + 2).to_be_bytes());
    out.extend(exif);
    out.extend(&plain[2..]);
    out
}

/// Six greys 40 apart.
fn block_color(x: u32, y: u32) -> [u8; 3] {
    [(20 + 40 * (3 * y + x)) as u8; 3]
}

#[test]
fn exif_orientation_is_applied() {
    /// Which source block (x, y) of the 3 × 2 stored ones is shown at (x, y): EXIF 2.3, tag 274.
    type Shown = fn(u32, u32) -> (u32, u32);
    let upright: [Shown; 4] = [|x, y| (x, y), |x, y| (2 - x, y), |x, y| (2 - x, 1 - y), |x, y| (x, 1 - y)];
    let sideways: [Shown; 4] = [|x, y| (y, x), |x, y| (y, 1 - x), |x, y| (2 - y, 1 - x), |x, y| (2 - y, x)];
    for (i, shown) in upright.into_iter().chain(sideways).enumerate() {
        let orientation = i as u16 + 1;
        let picture = decode(&jpeg(orientation)).unwrap();
        let (w, h) = if orientation <= 4 { (3, 2) } else { (2, 3) };
        assert_eq!((picture.width, picture.height), (w * 8, h * 8), "orientation {orientation}");
        for (y, x) in (0..h * 8).flat_map(|y| (0..w * 8).map(move |x| (y, x))) {
            let (sx, sy) = shown(x / 8, y / 8);
            let at = ((y * w * 8 + x) * 3) as usize;
            for (found, expected) in picture.pixels[at..at + 3].iter().zip(block_color(sx, sy)) {
                assert!(found.abs_diff(expected) <= LOSSY_DIFF_MAX, "orientation {orientation} at {x}, {y}");
            }
        }
    }
    for unknown in [0, 9, 65535] {
        assert_eq!(decode(&jpeg(unknown)), decode(&jpeg(1)));
    }
}

#[test]
fn truncated_pictures_are_errors() {
    for (name, bytes) in fixtures().into_iter().chain([("jpeg".to_owned(), jpeg(6))]) {
        for length in 0..bytes.len() {
            let Err(e) = decode(&bytes[..length]) else { panic!("{name} cut to {length} of {} bytes", bytes.len()) };
            let known = matches!(e, PictureError::Truncated { .. } | PictureError::Format);
            assert!(known, "{name} cut to {length} bytes: {e}");
        }
        // Cameras pad their files.
        let padded = [&bytes[..], &[0; 100]].concat();
        assert_eq!(decode(&padded), decode(&bytes), "{name}");
    }
}

#[test]
fn damaged_pictures_do_not_panic() {
    let mut random = Random(20);
    let limits = Limits { pixels_max: 1 << 20 };
    let params = SliceParams { scale_resolution: 112, patch_size: 14, max_slices: 9 };
    let (mut refused, mut read) = (0, 0);
    for (name, bytes) in fixtures().into_iter().chain([("jpeg".to_owned(), jpeg(6))]) {
        for round in 0..300 {
            let mut bytes = bytes.clone();
            for _ in 0..=random.below(4) {
                let at = if round % 2 == 0 { random.below(bytes.len()) } else { random.below(bytes.len().min(64)) };
                bytes[at] = if round % 3 == 0 { random.below(256) as u8 } else { bytes[at] ^ (1 << random.below(8)) };
            }
            match Rgb::decode(&bytes, limits) {
                Err(_) => refused += 1,
                Ok(picture) => {
                    read += 1;
                    assert_eq!(picture.pixels.len() as u64, 3 * u64::from(picture.width) * u64::from(picture.height));
                    if let Ok(plan) = plan(picture.width, picture.height, &params, Detail::X4) {
                        assert_eq!(crops(&picture, &plan).unwrap().len(), plan.crops().count(), "{name}");
                    }
                }
            }
        }
    }
    println!("{refused} refused, {read} read");
    assert!(refused > 1000 && read > 100, "{refused} refused, {read} read: the damage does not reach both sides");

    for head in [&b"\x89PNG\r\n\x1a\n"[..], b"\xff\xd8\xff", b"RIFF\xff\xff\xff\xffWEBP", b"GIF89a", b"BM", b""] {
        for _ in 0..100 {
            let tail = (0..random.below(600)).map(|_| random.below(256) as u8);
            assert!(decode(&head.iter().copied().chain(tail).collect::<Vec<_>>()).is_err());
        }
    }
}

#[test]
fn sizes_are_limited_before_anything_is_decoded() {
    // Headers that promise much and hold nothing.
    let chunk = |tag: &[u8; 4], data: &[u8]| {
        let mut crc = !0u32;
        for byte in tag.iter().chain(data) {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
            }
        }
        [&(data.len() as u32).to_be_bytes(), &tag[..], data, &(!crc).to_be_bytes()].concat()
    };
    for (width, height) in [(100_000u32, 100_000u32), (0x7fff_ffff, 0x7fff_ffff), (0x7fff_ffff, 1), (8193, 8192)] {
        let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
        let png = [b"\x89PNG\r\n\x1a\n", &chunk(b"IHDR", &header)[..], &chunk(b"IDAT", &[]), &chunk(b"IEND", &[])];
        match decode(&png.concat()) {
            Err(PictureError::Large { width: w, height: h, .. }) => assert_eq!((w, h), (width, height)),
            // A single row that would not fit: refused by the decoder itself.
            Err(PictureError::Damaged { reason, .. }) if width == 0x7fff_ffff => {
                assert_eq!(reason, "Memory limit exceeded");
            }
            other => panic!("{width} x {height}: {other:?}"),
        }
    }
    let (_, bytes) = fixtures().into_iter().find(|f| f.0 == "rgb444.jpg").unwrap();
    let mut jpeg = bytes.clone();
    let sof = jpeg.windows(2).position(|m| m == [0xff, 0xc0]).unwrap();
    jpeg[sof + 5..sof + 9].fill(0xff);
    assert!(matches!(decode(&jpeg), Err(PictureError::Large { width: 65535, height: 65535, .. })));

    let exact = Rgb::decode(&bytes, Limits { pixels_max: 23 * 17 });
    assert!(exact.is_ok());
    let error = Rgb::decode(&bytes, Limits { pixels_max: 23 * 17 - 1 }).unwrap_err();
    assert_eq!(error.to_string(), "picture of 23 x 17 pixels: expected at most 390 pixels: make it smaller");
    let error = decode(b"GIF89a").unwrap_err();
    assert_eq!(error.to_string(), "not a picture this build reads (PNG, JPEG, WebP): convert it to one of them");
}

#[test]
fn a_picture_without_its_pixels_has_no_crops() {
    let params = SliceParams { scale_resolution: 112, patch_size: 14, max_slices: 9 };
    let plan = plan(200, 200, &params, Detail::X16).unwrap();
    for bytes in [0, 200 * 200 * 3 - 1, 200 * 200 * 3 + 1] {
        let picture = Rgb { width: 200, height: 200, pixels: vec![0; bytes] };
        assert_eq!(crops(&picture, &plan), Err(PictureError::Shape { width: 200, height: 200, bytes }));
    }
}
