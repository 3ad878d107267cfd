//! Writes a checkpoint as one model file. Streams: memory use does not depend on the size of the checkpoint.
//! Equal weights give equal bytes, whether the experts come fused or one by one.

use crate::{
    checkpoint::Checkpoint,
    config::{Config, Ffn},
    convert::Converter,
    error::{Error, Result},
    metadata,
    output::Partial,
    plan::{Data, ExpertLayer, Item, Layout, Plan, Source, Types},
    tokenizer::Tokenizer,
};
use forerun_format::{
    crc32c::Crc32c,
    gguf::{HeaderBuilder, Kv},
    keys,
};
use std::path::Path;

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packed {
    /// Length of the file.
    pub bytes: u64,
    /// Tensors in its directory.
    pub tensors: usize,
    /// Routed experts over all layers.
    pub experts: u64,
}

/// Packs the checkpoint in `from` into the file `to`, which must not exist unless `force` is set. `progress` is told
/// the bytes written so far and in total.
///
/// # Errors
/// If the checkpoint is damaged or not supported, there is not enough space, or I/O fails; then `to` is as it was.
pub fn pack(from: &Path, to: &Path, types: Types, force: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<Packed> {
    write(&Checkpoint::open(from)?, Layout::Packed, to, types, force, progress)
}

/// Writes `checkpoint` in `layout`; else as [`pack`].
pub(crate) fn write(
    checkpoint: &Checkpoint,
    layout: Layout,
    to: &Path,
    types: Types,
    force: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed> {
    let config = Config::load(checkpoint)?;
    let tokenizer = Tokenizer::load(checkpoint, config.text.vocab)?;
    let plan = Plan::new(checkpoint, &config, types, layout)?;
    if let [first, ..] = plan.unused.as_slice() {
        log::warn!("{} tensors of the checkpoint are not used by this model ({first}, ...)", plan.unused.len());
    }

    for (want, block, n) in &plan.misfits {
        let (want, block, elems) = (want.name(), block.name(), want.block_elems());
        log::info!("{n} matrices are {block}, not {want}: their rows are no multiple of {elems}");
    }

    let mut header = HeaderBuilder::new();
    metadata::write(&mut header, &config, tokenizer, &plan, layout)?;
    let mut offsets = Vec::with_capacity(plan.items.len());
    for item in &plan.items {
        offsets.push(header.tensor(&item.name, item.block, &item.ne)?);
    }
    // The checksums are known only at the end, but not their number: the header keeps its length.
    let data_offset = header.bytes().len() as u64;
    let total = data_offset
        .checked_add(header.data_bytes())
        .ok_or_else(|| Error::input("the packed file", "a size beyond 64 bits", "a smaller one"))?;

    let mut writer = Writer {
        checkpoint,
        out: Partial::create(to, force, total)?,
        converter: Converter::default(),
        data_offset,
        total,
        progress,
    };
    let mut tensor_crcs = Vec::with_capacity(plan.items.len());
    let mut expert_crcs = Vec::new();
    for (item, offset) in plan.items.iter().zip(offsets) {
        match &item.data {
            Data::Matrix(source) => {
                tensor_crcs.push(writer.tensor(item, offset, std::slice::from_ref(source))?);
            }
            Data::ExpertPart(layer, k) => {
                let parts: Vec<_> = (0..layer.experts).map(|e| layer.sources(e)[*k].clone()).collect();
                tensor_crcs.push(writer.tensor(item, offset, &parts)?);
            }
            Data::Experts(layer) => {
                writer.experts(layer, offset, &mut expert_crcs)?;
                tensor_crcs.push(0);
            }
        }
    }
    let experts = match &config.text.ffn {
        Ffn::Moe(m) => m.experts * config.text.layers,
        Ffn::Dense(_) => 0,
    };
    if layout == Layout::Packed {
        header.set(keys::CRC_TENSORS, Kv::U32s(tensor_crcs));
        if experts > 0 {
            header.set(keys::CRC_EXPERTS, Kv::U32s(expert_crcs));
        }
    }
    let bytes = header.bytes();
    assert_eq!(bytes.len() as u64, data_offset, "checksums changed the header's length");
    writer.out.seek(0);
    writer.out.write(&bytes)?;
    (writer.progress)(total, total);
    writer.out.commit()?;
    Ok(Packed { bytes: total, tensors: plan.items.len(), experts })
}

struct Writer<'a> {
    checkpoint: &'a Checkpoint,
    out: Partial,
    converter: Converter,
    data_offset: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Writer<'_> {
    /// Writes one tensor, which is `sources` one after the other, and returns its checksum.
    fn tensor(&mut self, item: &Item, offset: u64, sources: &[Source]) -> Result<u32> {
        let mut crc = Crc32c::default();
        let Self { out, converter, progress, data_offset, total, checkpoint } = self;
        let mut at = *data_offset + offset;
        out.seek(at);
        for source in sources {
            converter.run(checkpoint, source, item.block, |bytes| {
                crc.update(bytes);
                out.write(bytes)?;
                at += bytes.len() as u64;
                progress(at, *total);
                Ok(())
            })?;
        }
        Ok(crc.finish())
    }

    /// Writes a layer's experts and adds their checksums to `crcs`.
    fn experts(&mut self, layer: &ExpertLayer, offset: u64, crcs: &mut Vec<u32>) -> Result<()> {
        let mut padding: Vec<u8> = Vec::new();
        for e in 0..layer.experts {
            let start = self.data_offset + offset + e * layer.stride;
            self.out.seek(start);
            let mut crc = Crc32c::default();
            let mut written = 0;
            for (source, block) in layer.sources(e).iter().zip(layer.types) {
                let out = &mut self.out;
                self.converter.run(self.checkpoint, source, block, |bytes| {
                    crc.update(bytes);
                    written += bytes.len() as u64;
                    out.write(bytes)
                })?;
            }
            padding.clear();
            padding.resize((layer.stride - written) as usize, 0);
            crc.update(&padding);
            crcs.push(crc.finish());
            (self.progress)(start + layer.stride, self.total);
        }
        Ok(())
    }
}
