//! Crops of pictures against those of transformers' processor (torchvision backend): sizes, then pixels.

use forerun_camera::picture::{Limits, Rgb};
use forerun_camera::resize::crops;
use forerun_engine::slicing::{CropPlan, Detail, SliceParams, plan};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::PathBuf;

fn goldens() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("goldens")
}

fn json(name: &str) -> Vec<Value> {
    serde_json::from_slice(&fs::read(goldens().join(name)).unwrap()).unwrap()
}

fn picture(name: &str) -> Rgb {
    Rgb::decode(&fs::read(goldens().join(name)).unwrap(), Limits::default()).unwrap()
}

fn number(v: &Value) -> u32 {
    v.as_u64().unwrap().try_into().unwrap()
}

fn pairs(v: &Value) -> Vec<(u32, u32)> {
    v.as_array().unwrap().iter().map(|p| (number(&p[0]), number(&p[1]))).collect()
}

fn detail(entry: &Value) -> Detail {
    Detail::parse(entry["downsample_mode"].as_str().unwrap()).unwrap()
}

fn target_sizes(plan: &CropPlan) -> Vec<(u32, u32)> {
    plan.crops().map(|c| (c.rows, c.cols)).collect()
}

/// Patches one after the other, each (channel, row, column): what the vision tower reads.
fn patches(crop: &Rgb) -> Vec<u8> {
    let (w, h) = (crop.width as usize, crop.height as usize);
    assert_eq!(crop.pixels.len(), w * h * 3);
    let mut out = Vec::with_capacity(w * h * 3);
    for (py, px) in (0..h / 14).flat_map(|y| (0..w / 14).map(move |x| (y, x))) {
        for (c, y) in (0..3).flat_map(|c| (0..14).map(move |y| (c, y))) {
            out.extend((0..14).map(|x| crop.pixels[((py * 14 + y) * w + px * 14 + x) * 3 + c]));
        }
    }
    out
}

/// Differences so far.
#[derive(Default)]
struct Diff {
    most: u8,
    sum: u64,
    count: u64,
}

impl Diff {
    fn add(&mut self, what: &str, found: &[u8], expected: &[u8]) {
        assert_eq!(found.len(), expected.len(), "{what}");
        let mut own = Diff { count: found.len() as u64, ..Diff::default() };
        for (a, b) in found.iter().zip(expected) {
            own.most = own.most.max(a.abs_diff(*b));
            own.sum += u64::from(a.abs_diff(*b));
        }
        // No tolerance: the resize repeats the reference's integer arithmetic.
        assert!(own.most == 0, "{what}: samples differ by up to {}/255, {:.3} on average", own.most, own.mean());
        *self = Diff { most: self.most.max(own.most), sum: self.sum + own.sum, count: self.count + own.count };
    }

    fn mean(&self) -> f64 {
        self.sum as f64 / self.count as f64
    }
}

#[test]
fn photos_become_the_references_crops() {
    let bytes = fs::read(goldens().join("preprocess/photos.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let (mut diff, mut exact, mut total) = (Diff::default(), 0, 0);
    let entries = json("preprocess/photos.json");
    assert_eq!(entries.len(), 36);
    for entry in &entries {
        let key = entry["key"].as_str().unwrap();
        let photo = picture(entry["file"].as_str().unwrap());
        assert_eq!((photo.width, photo.height), (number(&entry["size_wh"][0]), number(&entry["size_wh"][1])), "{key}");
        let params = SliceParams {
            scale_resolution: number(&entry["scale_resolution"]),
            patch_size: number(&entry["patch_size"]),
            max_slices: number(&entry["max_slice_nums"]),
        };
        let plan = plan(photo.width, photo.height, &params, detail(entry)).unwrap();
        let grid = (number(&entry["grid_rows_cols"][0]), number(&entry["grid_rows_cols"][1]));
        assert_eq!(plan.grid.unwrap_or((0, 0)), grid, "{key}");
        assert_eq!(target_sizes(&plan), pairs(&entry["target_sizes"]), "{key}");

        let crops: Vec<_> = crops(&photo, &plan).unwrap().iter().map(patches).collect();
        let golden = entry["crops"].as_array().unwrap();
        assert_eq!(crops.len(), golden.len(), "{key}");
        for (crop, golden) in crops.iter().zip(golden) {
            total += 1;
            let hash: String = Sha256::digest(crop).iter().map(|b| format!("{b:02x}")).collect();
            exact += u32::from(hash == golden["u8_sha256"].as_str().unwrap());
        }
        let last = crops.len() - 1;
        for i in if last == 0 { vec![0] } else { vec![0, last] } {
            let index = tensors.tensor(&format!("{key}.crop{i}.index")).unwrap();
            let values = tensors.tensor(&format!("{key}.crop{i}.patches")).unwrap();
            assert_eq!(values.dtype(), Dtype::F32);
            let values: Vec<u8> = values
                .data()
                .as_chunks::<4>()
                .0
                .iter()
                .map(|x| ((f32::from_le_bytes(*x) * 0.5 + 0.5) * 255.0).round() as u8)
                .collect();
            let index: Vec<usize> = match index.dtype() {
                Dtype::I32 => index.data().as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b) as usize).collect(),
                Dtype::I64 => index.data().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as usize).collect(),
                other => panic!("{key}: index is {other:?}"),
            };
            let found: Vec<u8> = index.iter().flat_map(|n| &crops[i][n * 588..][..588]).copied().collect();
            diff.add(&format!("{key} crop {i}"), &found, &values);
        }
    }
    println!("photos: {exact} of {total} crops identical; patches listed: max {}, mean {:.5}", diff.most, diff.mean());
    // After the patches, which say by how much.
    assert_eq!(exact, total, "hashes of whole crops");
}

#[test]
fn pictures_and_video_frames_become_the_references_pixel_values() {
    let mut diff = Diff::default();
    let entries = json("tiny-moe/image.json");
    assert_eq!(entries.len(), 20);
    for entry in &entries {
        let name = entry["name"].as_str().unwrap();
        let video = entry["is_video"].as_bool().unwrap();
        let max_slices = entry["max_slice_nums"].as_u64().map_or(if video { 1 } else { 9 }, |n| n as u32);
        let params = SliceParams { scale_resolution: 112, patch_size: 14, max_slices };
        let (mut sizes, mut found) = (Vec::new(), Vec::new());
        for file in entry["files"].as_array().unwrap() {
            let picture = picture(file.as_str().unwrap());
            let plan = plan(picture.width, picture.height, &params, detail(entry)).unwrap();
            sizes.extend(target_sizes(&plan));
            found.extend(crops(&picture, &plan).unwrap().iter().flat_map(patches));
        }
        assert_eq!(sizes, pairs(&entry["target_sizes"]), "{name}");

        let bytes = fs::read(goldens().join(format!("tiny-moe/{name}.safetensors"))).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let values = tensors.tensor(if video { "pixel_values_videos" } else { "pixel_values" }).unwrap();
        assert_eq!(values.dtype(), Dtype::U8);
        let columns = values.shape()[2];
        assert_eq!(values.shape(), [3, 14, found.len() / 42], "{name}");
        // (3, 14, 14 P) → (P, 3, 14, 14)
        let expected: Vec<u8> = (0..columns / 14)
            .flat_map(|p| (0..42).flat_map(move |row| (0..14).map(move |x| row * columns + p * 14 + x)))
            .map(|at| values.data()[at])
            .collect();
        diff.add(name, &found, &expected);
    }
    println!("pixel_values: max {}, mean {:.5}", diff.most, diff.mean());
}
