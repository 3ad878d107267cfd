//! Model files whose parts fit together, of odd sizes and types, or damaged in places. What is accepted and small is run.
#![no_main]

use forerun_engine::{Checksums, 
    CropPixels, Engine, Input, NoObserver, Tuning,
    config::Config,
    plan::{KvType, Options, Plan, Residency, VisionOptions},
    ports::{Clock, Completion, Read, ReadError, Serial, Storage},
    slicing::Detail,
    weights::Weights,
};
use forerun_fuzz::{open, spec::Spec};
use forerun_kernels::KernelSet;
use libfuzzer_sys::{Corpus, fuzz_target};

/// Data and f32 elements of a file that is run.
const DATA_BYTES_MAX: u64 = 2 << 20;
const BLOCK_ELEMS_MAX: usize = 1 << 20;

fuzz_target!(|spec: Spec| -> Corpus {
    let Ok(built) = spec.build() else { return Corpus::Reject };
    let bytes = built.header.as_slice();
    let Some(file_bytes) = built.data_bytes.checked_add(bytes.len() as u64) else { return Corpus::Reject };
    let opened = match open::header(bytes, file_bytes) {
        Ok(h) => {
            let opened = open::engine_side(&h, bytes.len());
            open::app_side(&h, bytes.len(), opened.as_ref().ok().map(|(config, _)| config));
            opened
        }
        Err(e) => Err(e),
    };
    match opened {
        Ok((config, weights)) => run(&config, &weights, bytes, file_bytes, spec.seed),
        Err(e) => assert!(!built.whole, "refused: {e}"),
    }
    Corpus::Keep
});

/// One prompt of three tokens in chunks of two, one more token, and a crop in each mode.
fn run(config: &Config, weights: &Weights, header: &[u8], file_bytes: u64, seed: u32) {
    let vision = config.vision.as_ref().filter(|(v, _)| v.patch <= 16);
    let detail = vision.map(|(v, _)| if v.insert_layer.is_some() { Detail::X16 } else { Detail::X4 });
    let residency = if seed & 8 == 0 { Residency::Resident } else { Residency::Streamed };
    let options = Options {
        context: config.text.context_max.min(8),
        chunk: 2,
        kv: if seed & 1 == 0 { KvType::F16 } else { KvType::F32 },
        vision: detail.map(|detail| VisionOptions { detail, picture_bytes: 0, residency }),
        prefix: seed & 4 == 0,
        cap_bytes: None,
        slots_max: Some(1 + seed as usize % 5),
        tokenizer_bytes: 0,
    };
    let Ok(plan) = Plan::new(config, weights, options) else { return };
    if file_bytes - header.len() as u64 > DATA_BYTES_MAX || plan.block_elems() > BLOCK_ELEMS_MAX {
        return;
    }
    let mut file = header.to_vec();
    file.resize(file_bytes as usize, 0);
    fill(&mut file[header.len()..], seed);
    // The resident region is a copy on a boundary of its own, padded as the file may not be.
    let mut resident = vec![0f32; plan.resident_bytes / 4];
    let from = &file[weights.resident_offset as usize..];
    let from = &from[..from.len().min(plan.resident_bytes)];
    bytemuck::cast_slice_mut::<f32, u8>(&mut resident)[..from.len()].copy_from_slice(from);

    let mut block = vec![0f32; plan.block_elems()];
    let storage = Slots::new(&file, plan.storage_slots(), plan.slot_bytes);
    let kernels = KernelSet::available().nth(seed as usize / 16 % KernelSet::available().count()).expect("kernels");
    let tuning = Tuning { predict: seed & 2 == 0, checksums: Checksums::Never, ..Tuning::default() };
    let resident = bytemuck::cast_slice(&resident);
    let mut engine =
        Engine::new(config, weights, &plan, resident, &mut block, storage, &Serial, kernels, &Still, tuning);
    let mut step = |ids: &[u32]| {
        let positions: Vec<u32> = (0..ids.len() as u32).collect();
        let input = Input { ids, positions: [&positions; 3] };
        let _ = engine.run_saving(input, (ids.len() > 2).then_some(2), &mut NoObserver);
    };
    step(&[1, 2, 3]);
    step(&[0]);
    step(&[config.text.vocab as u32 - 1, config.tokens.image]);
    if let Some((v, _)) = vision {
        for (detail, rows, cols) in [(Detail::X16, 4, 8), (Detail::X4, 2, 6)] {
            let rgb = vec![seed as u8; rows * cols * v.patch * v.patch * 3];
            let _ = engine.see(CropPixels { rows, cols, rgb: &rgb }, detail, &mut NoObserver);
        }
        engine.rewind();
        let _ = engine.run(Input { ids: &[5], positions: [&[2]; 3] }, &mut NoObserver);
        engine.reset();
        let _ = engine.run(Input { ids: &[5], positions: [&[0]; 3] }, &mut NoObserver);
    }
}

/// Bytes that are small numbers in most types; with some seeds, any bytes.
fn fill(data: &mut [u8], seed: u32) {
    let mut x = u64::from(seed) | 1;
    for (i, b) in data.iter_mut().enumerate() {
        x = x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let any = (x >> 56) as u8;
        *b = if seed % 4 == 3 || i % 2 == 0 { any } else { 0x3c | any & 0x80 };
    }
}

struct Still;

impl Clock for Still {
    fn now_us(&self) -> u64 {
        0
    }
}

/// Reads that land in order, two at a time.
struct Slots<'a> {
    file: &'a [u8],
    slots: Vec<f32>,
    slot_bytes: usize,
    flying: Vec<Read>,
}

impl<'a> Slots<'a> {
    fn new(file: &'a [u8], slots: usize, slot_bytes: usize) -> Self {
        Self { file, slots: vec![0.0; slots * slot_bytes / 4], slot_bytes, flying: Vec::new() }
    }
}

impl Storage for Slots<'_> {
    fn slots(&self) -> usize {
        (self.slots.len() * 4).checked_div(self.slot_bytes).unwrap_or(0)
    }

    fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    fn depth_max(&self) -> usize {
        2
    }

    fn submit(&mut self, reads: &[Read]) -> usize {
        let n = reads.len().min(2 - self.flying.len());
        self.flying.extend_from_slice(&reads[..n]);
        n
    }

    fn complete(&mut self, _wait: bool) -> Option<Completion> {
        let r = (!self.flying.is_empty()).then(|| self.flying.remove(0))?;
        let from = self.file.get(r.offset as usize..).and_then(|f| f.get(..r.bytes as usize));
        let result = from.map(|from| self.slot_mut(r.slot)[..from.len()].copy_from_slice(from)).ok_or(ReadError::Eof);
        Some(Completion { slot: r.slot, result })
    }

    fn slot(&self, slot: u32) -> &[u8] {
        &bytemuck::cast_slice(&self.slots)[slot as usize * self.slot_bytes..][..self.slot_bytes]
    }

    fn slot_mut(&mut self, slot: u32) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.slots)[slot as usize * self.slot_bytes..][..self.slot_bytes]
    }

    fn read_at(&mut self, offset: u64, out: &mut [u8]) -> Result<(), ReadError> {
        let from = self.file.get(offset as usize..).and_then(|f| f.get(..out.len())).ok_or(ReadError::Eof)?;
        out.copy_from_slice(from);
        Ok(())
    }
}
