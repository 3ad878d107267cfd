//! Reads random expert-sized pieces of a file through both engines, in turns, and prints the rates.
//!
//! `cargo run --release -p forerun-linux --example read_rate -- FILE [KIB_A_READ] [DEPTH]`

use std::path::PathBuf;
use std::time::Instant;

use forerun_engine::ports::{Read, Storage};
use forerun_linux::{Arena, BLOCK_BYTES, DirectFile, FileStorage, IoChoice};

const ROUNDS: usize = 3;
const BYTES_A_ROUND: usize = 1 << 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let path = PathBuf::from(args.get(1).ok_or("usage: read_rate FILE [KIB_A_READ] [DEPTH]")?);
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |text| text.parse());
    let (bytes, depth) = (number(2, 1728)? * 1024, number(3, 4)?);
    let mut seed = 1u64;
    for round in 0..ROUNDS {
        for io in [IoChoice::Auto, IoChoice::Pread] {
            let file = DirectFile::open(&path)?;
            let places = (file.len().saturating_sub(bytes as u64) / BLOCK_BYTES as u64).max(1);
            let memory = Arena::new(depth * bytes)?.take_io(depth * bytes)?;
            let mut storage = FileStorage::open(file, memory, depth, bytes, io, depth)?;
            let mut next = |slot| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                Read { slot, offset: (seed >> 33) % places * BLOCK_BYTES as u64, bytes: bytes as u32 }
            };
            let start = Instant::now();
            let reads: Vec<_> = (0..depth as u32).map(&mut next).collect();
            storage.submit(&reads);
            let (mut done, wanted) = (0, BYTES_A_ROUND / bytes);
            while let Some(completion) = storage.complete(true) {
                completion.result.map_err(|error| error.to_string())?;
                done += 1;
                if done + depth <= wanted {
                    storage.submit(&[next(completion.slot)]);
                }
            }
            let seconds = start.elapsed().as_secs_f64();
            let rate = (done * bytes) as f64 / 1e6 / seconds;
            let way = if storage.file().is_direct() { "O_DIRECT" } else { "buffered" };
            println!(
                "round {round}: {} ({way}): {rate:.0} MB/s, {done} reads of {bytes} bytes, depth {depth}",
                storage.backend()
            );
        }
    }
    Ok(())
}
