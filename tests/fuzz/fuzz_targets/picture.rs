//! Bytes as a picture file: its size, its pixels, its crops.
#![no_main]

use forerun_camera::{
    picture::{Limits, Rgb, dimensions},
    resize,
};
use forerun_engine::slicing::{self, Detail, SliceParams};
use forerun_fuzz::bounded_by;
use libfuzzer_sys::fuzz_target;

const PIXELS_MAX: u64 = 1 << 20;
/// The plan's 11 bytes a pixel, and what a decoder keeps beside them: see `Limits::pixels_max`.
const DECODE_BYTES: usize = 11 * PIXELS_MAX as usize + (16 << 20);

fuzz_target!(|bytes: &[u8]| {
    // A compressed profile or text is input too: decoders copy it.
    let room = DECODE_BYTES + 4 * bytes.len();
    let size = bounded_by("dimensions", room, || dimensions(bytes));
    let decoded = bounded_by("decode", room, || Rgb::decode(bytes, Limits { pixels_max: PIXELS_MAX }));
    let Ok(picture) = decoded else { return };
    let (w, h) = size.expect("a size for what can be decoded");
    let (width, height) = (picture.width, picture.height);
    assert!((width, height) == (w, h) || (width, height) == (h, w), "{width} x {height}, header {w} x {h}");
    assert_eq!(picture.pixels.len() as u64, u64::from(width) * u64::from(height) * 3);
    assert!(u64::from(width) * u64::from(height) <= PIXELS_MAX);

    for detail in [Detail::X16, Detail::X4] {
        let params = SliceParams { scale_resolution: 112, patch_size: 14, max_slices: 9 };
        let Ok(plan) = slicing::plan(width, height, &params, detail) else {
            assert!(width.max(height) / 100 >= width.min(height), "{width} x {height} refused");
            continue;
        };
        let crops = resize::crops(&picture, &plan).expect("crops of a picture");
        let most = slicing::crop_patches_max(&params, detail).expect("a bound");
        assert_eq!(crops.len(), plan.crops().count());
        for (crop, planned) in crops.iter().zip(plan.crops()) {
            assert_eq!((crop.width, crop.height), (planned.cols * 14, planned.rows * 14));
            assert_eq!(crop.pixels.len() as u32, crop.width * crop.height * 3);
            assert!(planned.rows * planned.cols <= most);
            assert!(planned.rows.is_multiple_of(detail.merge()) && planned.cols.is_multiple_of(detail.merge()));
        }
    }
});
