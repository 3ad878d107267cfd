//! Reads safetensors files (<https://huggingface.co/docs/safetensors>): a length, a JSON header, the data.
//!
//! The header is untrusted: its length is capped, every size product and offset is checked, names are unique, and the
//! tensors must cover the data section without holes or overlaps. Data is read with pread into the caller's buffer;
//! nothing is mapped, so memory use does not depend on the file.

use crate::error::{Error, Result};
use forerun_format::BlockType;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use std::{collections::BTreeMap, fmt, fs::File, os::unix::fs::FileExt, path::Path};

/// Longest header accepted, in bytes. The largest model expected has 31,792 tensors, a header of about 5 MB.
pub const HEADER_BYTES_MAX: u64 = 32 << 20;

/// Element type of a stored tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// Upper half of an IEEE single.
    Bf16,
    /// Any other, by the name that the file gives it; cannot be packed.
    Other(String),
}

impl Dtype {
    fn from_name(name: &str) -> Self {
        match name {
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            other => Self::Other(other.chars().take(32).collect()),
        }
    }

    /// Bytes per element, `None` for types that cannot be packed.
    pub fn bytes(&self) -> Option<usize> {
        match self {
            Self::F32 => Some(4),
            Self::F16 | Self::Bf16 => Some(2),
            Self::Other(_) => None,
        }
    }

    /// The same type in a packed file.
    pub fn block(&self) -> Option<BlockType> {
        match self {
            Self::F32 => Some(BlockType::F32),
            Self::F16 => Some(BlockType::F16),
            Self::Bf16 => Some(BlockType::BF16),
            Self::Other(_) => None,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Other(name) => name,
        })
    }
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes, PyTorch's order (contiguous axis last); empty for a scalar.
    pub shape: Vec<u64>,
    /// Offset of the first byte from the start of the data section.
    pub begin: u64,
    /// Bytes of data.
    pub bytes: u64,
}

#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's entries in the file's order; refuses a name that comes twice, which a map would swallow.
struct RawHeader(BTreeMap<String, RawEntry>);

impl<'de> serde::Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<RawHeader, A::Error> {
                let mut out = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let entry = map.next_value::<RawEntry>()?;
                    if out.contains_key(&name) {
                        return Err(A::Error::custom(format!("tensor {name} comes twice")));
                    }
                    out.insert(name, entry);
                }
                Ok(RawHeader(out))
            }
        }
        d.deserialize_map(V)
    }
}

/// Parses the JSON header `json` of a file with `data_bytes` bytes after it. Offsets in the result lie inside the data.
///
/// # Errors
/// Bad JSON, a shape that contradicts its offsets, tensors that overlap, leave holes or reach past the data.
pub fn parse_header(json: &[u8], data_bytes: u64) -> Result<BTreeMap<String, Entry>> {
    let raw: RawHeader = serde_json::from_slice(json)
        .map_err(|e| Error::input("the safetensors header", format!("bad JSON ({e})"), "one object of tensors"))?;
    let mut out = BTreeMap::new();
    let mut spans = Vec::with_capacity(raw.0.len());
    for (name, r) in raw.0 {
        let [begin, end] = r.data_offsets;
        if begin > end || end > data_bytes {
            return Err(Error::input(
                format!("tensor {name}"),
                format!("data from {begin} to {end}"),
                format!("data inside the {data_bytes} bytes that follow the header"),
            ));
        }
        let dtype = Dtype::from_name(&r.dtype);
        if let Some(each) = dtype.bytes() {
            let want = r.shape.iter().try_fold(each as u64, |b, &n| b.checked_mul(n));
            if want != Some(end - begin) {
                return Err(Error::input(
                    format!("tensor {name}"),
                    format!("{} bytes for {dtype} {:?}", end - begin, short(&r.shape)),
                    want.map_or_else(|| "a size that fits 64 bits".into(), |w| format!("{w} bytes")),
                ));
            }
        }
        spans.push((begin, end, name.clone()));
        out.insert(name, Entry { dtype, shape: r.shape, begin, bytes: end - begin });
    }
    spans.sort_unstable();
    let mut at = 0;
    for (begin, end, name) in &spans {
        if *begin != at {
            return Err(Error::input(
                format!("tensor {name}"),
                format!("data from {begin}"),
                format!("data from {at}, where the tensor before it ends"),
            ));
        }
        at = *end;
    }
    if at != data_bytes {
        return Err(Error::input(
            "the data section",
            format!("{data_bytes} bytes"),
            format!("{at} bytes, the sum of all tensors: download the file again"),
        ));
    }
    Ok(out)
}

fn short(shape: &[u64]) -> &[u64] {
    &shape[..shape.len().min(8)]
}

/// An open file with its parsed header.
#[derive(Debug)]
pub struct SafeTensors {
    file: File,
    path: std::path::PathBuf,
    data_offset: u64,
    entries: BTreeMap<String, Entry>,
}

impl SafeTensors {
    /// Opens `path` and checks its header against its length.
    ///
    /// # Errors
    /// If it cannot be read, or the header is damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io("open", path, &e))?;
        let file_bytes = file.metadata().map_err(|e| Error::io("read", path, &e))?.len();
        let here = |e: Error| match e {
            Error::Input(text) => Error::Input(format!("{}: {text}", path.display())),
            other => other,
        };
        if file_bytes < 8 {
            return Err(here(Error::input("length", format!("{file_bytes} bytes"), "a safetensors file")));
        }
        let mut len = [0; 8];
        file.read_exact_at(&mut len, 0).map_err(|e| Error::io("read", path, &e))?;
        let len = u64::from_le_bytes(len);
        let most = HEADER_BYTES_MAX.min(file_bytes - 8);
        if len > most {
            return Err(here(Error::input(
                "length of the safetensors header",
                format!("{len} bytes"),
                format!("at most {most}: download the file again"),
            )));
        }
        let mut json = vec![0; len as usize];
        file.read_exact_at(&mut json, 8).map_err(|e| Error::io("read", path, &e))?;
        let data_offset = 8 + len;
        let entries = parse_header(&json, file_bytes - data_offset).map_err(here)?;
        Ok(Self { file, path: path.to_path_buf(), data_offset, entries })
    }

    /// All tensors by name.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// Fills `out` with the bytes of tensor `entry` from `offset` on.
    ///
    /// # Errors
    /// If the range is not inside the tensor, or reading fails.
    pub fn read(&self, entry: &Entry, offset: u64, out: &mut [u8]) -> Result<()> {
        match offset.checked_add(out.len() as u64) {
            Some(end) if end <= entry.bytes => {}
            _ => {
                return Err(Error::input(
                    self.path.display(),
                    format!("a read of {} bytes at {offset}", out.len()),
                    format!("a range inside a tensor of {} bytes", entry.bytes),
                ));
            }
        }
        self.file
            .read_exact_at(out, self.data_offset + entry.begin + offset)
            .map_err(|e| Error::io("read", &self.path, &e))
    }
}
