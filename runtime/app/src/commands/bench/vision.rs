//! `forerun bench --vision`: the vision tower alone.

use super::{median, tokens};
use crate::cli::BenchArgs;
use crate::commands::{headline, say};
use crate::error::AppError;
use crate::model::Model;
use crate::session::Look;
use forerun_engine::slicing::Detail;
use forerun_engine::{CropPixels, NoObserver};
use serde_json::json;
use std::time::Instant;

/// Milliseconds that a crop of the model's own side takes at 16x and at 4x, in turn.
///
/// # Errors
/// If the model has no vision tower, it does not fit, or storage fails.
pub fn run(model: &Model, args: &BenchArgs) -> Result<(), AppError> {
    let Some((v, i)) = &model.config.vision else {
        return Err(AppError::Input("this model has no vision tower to measure".into()));
    };
    let side = i.scale_resolution as usize / v.patch;
    let pixels = (side * v.patch).pow(2);
    // The mode with the larger crops, so that one plan serves both.
    let look = Look { detail: Detail::X4, max_slices: Some(1), pixels_max: pixels as u64, file_bytes_max: 0 };
    let mut setup = model.setup(&args.engine, Some(model.vision_options(&look)?));
    setup.options.slots_max = setup.options.slots_max.or(Some(0));
    let rgb: Vec<u8> = tokens(pixels * 3, 256, 0).into_iter().map(|b| b as u8).collect();
    let crop = CropPixels { rows: side, cols: side, rgb: &rgb };
    model.with_engine(
        &setup,
        |s| s,
        |engine, facts| {
            let mut ms = [Vec::new(), Vec::new()];
            // One more than asked for: the first brings weights and buffers into the caches.
            for round in 0..=args.rounds {
                for (ms, detail) in ms.iter_mut().zip([Detail::X16, Detail::X4]) {
                    engine.reset();
                    let start = Instant::now();
                    engine.see(crop, detail, &mut NoObserver)?;
                    if round > 0 {
                        ms.push(start.elapsed().as_secs_f64() * 1e3);
                    }
                }
            }
            let [x16, x4] = &ms;
            let ratio = median(x4) / median(x16);
            if args.json {
                say(format_args!(
                    "{}\n",
                    json!({
                        "crop": [side * v.patch, side * v.patch],
                        "x16_ms": median(x16),
                        "x4_ms": median(x4),
                        "x16_rounds": x16,
                        "x4_rounds": x4,
                        "ratio": ratio,
                        "vision_residency": facts.plan.residency().map(crate::commands::plan::residency),
                        "kernels": facts.kernels,
                        "threads": facts.threads,
                        "peak_rss_bytes": forerun_linux::sys::peak_rss_bytes(),
                    })
                ))
            } else {
                say(format_args!(
                    "{}\na crop of {1} x {1} pixels\n16x: {2:.1} ms, rounds {x16:.1?}\n\
                     4x:  {3:.1} ms, rounds {x4:.1?}\n16x is {ratio:.2} times as fast\n",
                    headline(facts),
                    side * v.patch,
                    median(x16),
                    median(x4),
                ))
            }
        },
    )
}
