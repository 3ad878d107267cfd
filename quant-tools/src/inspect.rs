//! Prints what a model file holds and compares its data with the checksums. Works on any GGUF file; only packed ones
//! have checksums. Reads in small pieces and drops them from the page cache; never maps the file.

use crate::error::{Error, Result};
use forerun_format::{
    BlockType, FormatError,
    crc32c::Crc32c,
    gguf::{Header, Tensor, Value},
    keys,
};
use rustix::fs::{Advice, fadvise};
use serde_json::json;
use std::{
    fs::File,
    io::Write,
    num::NonZeroU64,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// Bytes of the header read at first, and the most that a header may have.
const HEADER_BYTES_FIRST: u64 = 1 << 20;
const HEADER_BYTES_MAX: u64 = 256 << 20;
/// Bytes of data read at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Characters of a value, and elements of an array, that are printed.
const VALUE_CHARS: usize = 72;
const ARRAY_ELEMS: usize = 8;

/// What to print and check.
#[derive(Debug, Clone, Copy)]
pub struct Inspect {
    /// List the tensors.
    pub tensors: bool,
    /// Read all data and compare checksums.
    pub checksums: bool,
    /// One JSON object instead of text.
    pub json: bool,
}

/// Inspects `path` and prints to `out`. `progress` is told the bytes checked so far and in total.
///
/// # Errors
/// If the file cannot be read, is not a model file, or a checksum differs; what there is to print is printed first.
pub fn inspect(path: &Path, options: Inspect, out: &mut dyn Write, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
    let source = Source::open(path)?;
    let bytes = source.header()?;
    let header = Header::parse(&bytes, source.bytes).map_err(|e| source.named(e))?;
    let sizes = Sizes::of(&header, source.bytes);
    let failures = if options.checksums { Some(check(&source, &header, progress)?) } else { None };
    let report = Report { header: &header, sizes: &sizes, failures: failures.as_ref() };
    let printed = if options.json { report.json(options, out) } else { report.text(options, out) };
    match printed {
        // A reader such as `head` that has seen enough is no failure.
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            return Err(Error::io("write", Path::new("output"), &e));
        }
        _ => {}
    }
    match failures {
        Some(Checked { wrong, .. }) if !wrong.is_empty() => {
            let shown: Vec<_> = wrong.iter().take(20).map(String::as_str).collect();
            let more = wrong.len() - shown.len();
            let more = if more > 0 { format!("\nand {more} more") } else { String::new() };
            Err(Error::Input(format!("{}: {}{more}", path.display(), shown.join("\n"))))
        }
        _ => Ok(()),
    }
}

struct Source {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl Source {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io("open", path, &e))?;
        let meta = file.metadata().map_err(|e| Error::io("read", path, &e))?;
        if !meta.is_file() {
            return Err(Error::Io(format!("{} is not a regular file: give a model file", path.display())));
        }
        Ok(Self { file, path: path.to_path_buf(), bytes: meta.len() })
    }

    fn named(&self, e: FormatError) -> Error {
        Error::Input(format!("{}: {e}", self.path.display()))
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, at).map_err(|e| Error::io("read", &self.path, &e))?;
        // Best effort: a file system without page cache has nothing to drop.
        let _ = fadvise(&self.file, at, NonZeroU64::new(out.len() as u64), Advice::DontNeed);
        Ok(())
    }

    /// The beginning of the file, long enough for its header.
    fn header(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut want = HEADER_BYTES_FIRST.min(self.bytes);
        loop {
            let have = bytes.len();
            bytes.resize(want as usize, 0);
            self.read(have as u64, &mut bytes[have..])?;
            match Header::parse(&bytes, self.bytes) {
                Err(FormatError::Truncated { need }) if need <= self.bytes && want < self.bytes => {
                    if need > HEADER_BYTES_MAX {
                        return Err(self.named(FormatError::invalid(
                            "length of the header",
                            format!("at least {need} bytes"),
                            format!("at most {HEADER_BYTES_MAX}"),
                        )));
                    }
                    // Doubling keeps the number of attempts small; `need` alone may grow by one string at a time.
                    want = need.max(want.saturating_mul(2)).min(HEADER_BYTES_MAX).min(self.bytes);
                }
                Err(e) => return Err(self.named(e)),
                Ok(_) => return Ok(bytes),
            }
        }
    }
}

/// Bytes of the file by what they are for.
#[derive(Debug, Default, Clone, Copy)]
struct Sizes {
    header: u64,
    text: u64,
    vision: u64,
    embedding: u64,
    experts: u64,
    file: u64,
}

impl Sizes {
    fn of(header: &Header<'_>, file: u64) -> Self {
        let mut s = Self { header: header.data_offset.min(file), file, ..Self::default() };
        let untied = header.tensor("output.weight").is_some();
        for t in header.tensors() {
            // Sums of disjoint ranges inside the file cannot overflow.
            *match t.name {
                n if n.starts_with("v.") || n.starts_with("mm.") => &mut s.vision,
                "token_embd.weight" if untied => &mut s.embedding,
                n if n.contains("_exps.") => &mut s.experts,
                _ => &mut s.text,
            } += t.bytes;
        }
        s
    }

    fn rows(&self) -> [(&'static str, u64); 7] {
        let used = self.header + self.text + self.vision + self.embedding + self.experts;
        [
            ("header", self.header),
            ("resident text", self.text),
            ("vision", self.vision),
            ("embedding", self.embedding),
            ("experts", self.experts),
            ("padding", self.file.saturating_sub(used)),
            ("file", self.file),
        ]
    }
}

/// Result of the comparison with the checksums.
struct Checked {
    tensors: u64,
    experts: u64,
    wrong: Vec<String>,
}

/// Compares every tensor and expert with its checksum. A file without checksums has none to compare.
fn check(source: &Source, header: &Header<'_>, progress: &mut dyn FnMut(u64, u64)) -> Result<Checked> {
    let mut done = Checked { tensors: 0, experts: 0, wrong: Vec::new() };
    if header.get(keys::LAYOUT).is_none() {
        return Ok(done);
    }
    let named = |e| source.named(e);
    let tensors = header.tensors();
    let tensor_crcs = header.u32_array(keys::CRC_TENSORS, tensors.len()).map_err(named)?;
    let experts: u64 = tensors.iter().filter(|t| is_packed(t)).map(|t| t.ne[1]).fold(0, u64::saturating_add);
    let expert_crcs = match usize::try_from(experts) {
        Ok(0) => Vec::new(),
        n => header.u32_array(keys::CRC_EXPERTS, n.unwrap_or(usize::MAX)).map_err(named)?,
    };
    let mut expert_crcs = expert_crcs.into_iter();
    let mut reader = Summer { source, buffer: vec![0; CHUNK_BYTES], done: 0, progress };
    for (t, &expected) in tensors.iter().zip(&tensor_crcs) {
        if is_packed(t) {
            for (e, expected) in (0..t.ne[1]).zip(&mut expert_crcs) {
                let found = reader.sum(t.offset + e * t.ne[0], t.ne[0])?;
                done.experts += 1;
                if found != expected {
                    let layer = t.name.split('.').nth(1).unwrap_or(t.name);
                    done.wrong.push(mismatch(&format!("expert {e} of layer {layer}"), found, expected));
                }
            }
        } else {
            t.block_type().map_err(named)?;
            let found = reader.sum(t.offset, t.bytes)?;
            done.tensors += 1;
            if found != expected {
                done.wrong.push(mismatch(&format!("tensor {}", t.name), found, expected));
            }
        }
    }
    (reader.progress)(source.bytes, source.bytes);
    Ok(done)
}

fn mismatch(what: &str, found: u32, expected: u32) -> String {
    format!("{what}: checksum {found:08x}, expected {expected:08x}: re-copy the model file")
}

/// Whether `t` is a layer of packed experts, `[stride, experts]` bytes.
fn is_packed(t: &Tensor<'_>) -> bool {
    t.type_id == BlockType::I8 as u32
        && t.ne[2..] == [1, 1]
        && t.name.strip_suffix(keys::EXPERTS_PACKED).is_some_and(|n| n.ends_with('.'))
}

struct Summer<'a> {
    source: &'a Source,
    buffer: Vec<u8>,
    done: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Summer<'_> {
    fn sum(&mut self, mut at: u64, mut bytes: u64) -> Result<u32> {
        let mut crc = Crc32c::default();
        while bytes > 0 {
            let n = bytes.min(CHUNK_BYTES as u64);
            let piece = &mut self.buffer[..n as usize];
            self.source.read(at, piece)?;
            crc.update(piece);
            at += n;
            bytes -= n;
            self.done += n;
            (self.progress)(self.done.min(self.source.bytes), self.source.bytes);
        }
        Ok(crc.finish())
    }
}

struct Report<'a> {
    header: &'a Header<'a>,
    sizes: &'a Sizes,
    failures: Option<&'a Checked>,
}

impl Report<'_> {
    fn text(&self, options: Inspect, out: &mut dyn Write) -> std::io::Result<()> {
        for (key, value) in self.header.kv() {
            writeln!(out, "{key} = {}", abbreviate(*value))?;
        }
        writeln!(out)?;
        if options.tensors {
            for t in self.header.tensors() {
                writeln!(
                    out,
                    "{:<36} {:>6} {:<20} at {:<12} {} bytes",
                    t.name,
                    type_name(t),
                    t.shape_text(),
                    t.offset,
                    t.bytes
                )?;
            }
            writeln!(out)?;
        }
        for (what, bytes) in self.sizes.rows() {
            writeln!(out, "{what:<14} {bytes:>15} bytes {:>10.1} MiB", bytes as f64 / f64::from(1 << 20))?;
        }
        match self.failures {
            None => writeln!(out, "checksums: not read"),
            Some(c) if c.tensors + c.experts == 0 => writeln!(out, "checksums: none in this file"),
            Some(c) => {
                let wrong = if c.wrong.is_empty() { "all right".into() } else { format!("{} wrong", c.wrong.len()) };
                writeln!(out, "checksums: {} tensors, {} experts, {wrong}", c.tensors, c.experts)
            }
        }
    }

    fn json(&self, options: Inspect, out: &mut dyn Write) -> std::io::Result<()> {
        let keys: serde_json::Map<_, _> =
            self.header.kv().iter().map(|(k, v)| ((*k).to_string(), value_json(*v))).collect();
        let sizes: serde_json::Map<_, _> =
            self.sizes.rows().iter().map(|(k, n)| (format!("{}_bytes", k.replace(' ', "_")), json!(n))).collect();
        let mut root = json!({ "keys": keys, "sizes": sizes, "tensor_count": self.header.tensors().len() });
        if options.tensors {
            let row = |t: &Tensor<'_>| json!({ "name": t.name, "type": type_name(t), "shape": t.ne, "offset": t.offset, "bytes": t.bytes });
            root["tensors"] = self.header.tensors().iter().map(row).collect();
        }
        if let Some(c) = self.failures {
            root["checksums"] = json!({ "tensors": c.tensors, "experts": c.experts, "wrong": c.wrong });
        }
        writeln!(out, "{root:#}")
    }
}

fn type_name(t: &Tensor<'_>) -> String {
    BlockType::from_id(t.type_id).map_or_else(|| format!("id {}", t.type_id), |b| b.name().to_string())
}

/// A value on one line, cut where it is long; control characters are escaped.
fn abbreviate(value: Value<'_>) -> String {
    match value {
        Value::Uint(n) => n.to_string(),
        Value::Int(n) => n.to_string(),
        // Stored as f32 for the most part: print the short form.
        Value::Float(x) => (x as f32).to_string(),
        Value::Bool(b) => b.to_string(),
        Value::Str(s) => {
            let cut: String = s.chars().take(VALUE_CHARS).collect();
            let more = if cut.len() < s.len() { format!(" ... ({} bytes)", s.len()) } else { String::new() };
            format!("{cut:?}{more}")
        }
        Value::Array(a) => {
            let items: Vec<_> = a.iter().take(ARRAY_ELEMS).map(abbreviate).collect();
            let more = if a.len() > ARRAY_ELEMS { format!(", ... ({} in all)", a.len()) } else { String::new() };
            format!("[{}{more}]", items.join(", "))
        }
    }
}

fn value_json(value: Value<'_>) -> serde_json::Value {
    match value {
        Value::Uint(n) => json!(n),
        Value::Int(n) => json!(n),
        Value::Float(x) => json!(x as f32),
        Value::Bool(b) => json!(b),
        Value::Str(s) => json!(s),
        Value::Array(a) if a.len() > 4 * ARRAY_ELEMS => {
            json!({ "length": a.len(), "first": a.iter().take(ARRAY_ELEMS).map(value_json).collect::<Vec<_>>() })
        }
        Value::Array(a) => a.iter().map(value_json).collect(),
    }
}
