//! A checkpoint as one set of tensors and the JSON files beside them: a folder with `model.safetensors`, or with the
//! shards that `model.safetensors.index.json` names; or a made-up one. Only headers and small files are held in memory.

use crate::error::{Error, Result};
use crate::plan::Source;
use crate::safetensors::{Dtype, Entry, SafeTensors};
use crate::synth::Synthetic;
use forerun_format::shown;
use serde::de::DeserializeOwned;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// Longest side file (tokenizer, config, template) accepted, bytes.
const SIDE_FILE_BYTES_MAX: u64 = 64 << 20;

/// An opened checkpoint.
#[derive(Debug)]
pub enum Checkpoint {
    /// One on disk.
    Folder(Folder),
    /// A made-up one: it has every tensor that is asked for, in the shape that is asked for, as BF16.
    Synthetic(Synthetic),
}

/// An opened checkpoint folder.
#[derive(Debug)]
pub struct Folder {
    dir: PathBuf,
    shards: Vec<SafeTensors>,
    by_name: BTreeMap<String, usize>,
}

impl Folder {
    fn find(&self, name: &str) -> Option<(&SafeTensors, &Entry)> {
        let shard = &self.shards[*self.by_name.get(name)?];
        shard.entries().get(name).map(|e| (shard, e))
    }
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens every shard in `dir` and reads its header.
    ///
    /// # Errors
    /// If a file is missing, unreadable or damaged, or two shards hold the same tensor.
    pub fn open(dir: &Path) -> Result<Self> {
        let single = dir.join("model.safetensors");
        let files: BTreeSet<String> = if single.exists() {
            BTreeSet::from(["model.safetensors".to_string()])
        } else {
            let index = dir.join("model.safetensors.index.json");
            let text = read_side_file(&index)?.ok_or_else(|| {
                Error::input(
                    dir.display(),
                    "neither model.safetensors nor model.safetensors.index.json",
                    "a Hugging Face checkpoint folder",
                )
            })?;
            let index: Index = parse_json(&index, &text)?;
            index.weight_map.into_values().collect()
        };
        let mut shards = Vec::new();
        let mut by_name = BTreeMap::new();
        for file in files {
            if file.contains(['/', '\0']) || file == ".." {
                return Err(Error::input(
                    "model.safetensors.index.json",
                    format!("shard {file:?}"),
                    "a plain file name",
                ));
            }
            let path = dir.join(&file);
            if !path.exists() {
                return Err(Error::input(
                    path.display(),
                    "no such file",
                    "the shard that the index names: download it",
                ));
            }
            let shard = SafeTensors::open(&path)?;
            for name in shard.entries().keys() {
                if by_name.insert(name.clone(), shards.len()).is_some() {
                    return Err(Error::input(format!("tensor {name}"), "it in two shards", "each tensor once"));
                }
            }
            shards.push(shard);
        }
        Ok(Self::Folder(Folder { dir: dir.to_path_buf(), shards, by_name }))
    }

    /// The tensors of a folder that are not `used`, sorted.
    pub fn unused(&self, used: &BTreeSet<String>) -> Vec<String> {
        match self {
            Self::Folder(f) => f.by_name.keys().filter(|n| !used.contains(*n)).cloned().collect(),
            Self::Synthetic(_) => Vec::new(),
        }
    }

    /// Whether there is a tensor `name`.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Folder(f) => f.by_name.contains_key(name),
            Self::Synthetic(_) => true,
        }
    }

    /// The type of the tensor `name`, which must have `shape` (PyTorch's order) and a type that can be packed.
    ///
    /// # Errors
    /// If it is missing or differs.
    pub fn expect(&self, name: &str, shape: &[u64]) -> Result<Dtype> {
        let folder = match self {
            Self::Folder(f) => f,
            Self::Synthetic(_) => return Ok(Dtype::Bf16),
        };
        let Some((_, e)) = folder.find(name) else {
            return Err(Error::input(format!("tensor {name}"), "none in the checkpoint", format!("shape {shape:?}")));
        };
        if e.shape != shape {
            let found = &e.shape[..e.shape.len().min(8)];
            return Err(Error::input(format!("tensor {name}"), format!("{found:?}"), format!("{shape:?}")));
        }
        if e.dtype.bytes().is_none() {
            return Err(Error::input(format!("tensor {name}"), format!("type {}", e.dtype), "BF16, F16 or F32"));
        }
        Ok(e.dtype.clone())
    }

    /// The type of the elements of `source` and the bytes of each.
    ///
    /// # Errors
    /// If there is no such tensor, or its type cannot be packed.
    pub fn element(&self, source: &Source) -> Result<(Dtype, usize)> {
        let dtype = match self {
            Self::Folder(f) => f.find(&source.name).map(|(_, e)| e.dtype.clone()),
            Self::Synthetic(_) => Some(Dtype::Bf16),
        };
        dtype
            .and_then(|d| d.bytes().map(|n| (d, n)))
            .ok_or_else(|| Error::input(format!("tensor {}", source.name), "none", "BF16, F16 or F32"))
    }

    /// Fills `out`, whole rows, with the rows of the tensor from `row` on, counting rows over all leading axes.
    ///
    /// # Errors
    /// If they are not inside the tensor, or reading fails.
    pub fn read(&self, source: &Source, row: u64, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Folder(f) => {
                let missing = || Error::input(format!("tensor {}", source.name), "none", "it in the checkpoint");
                let (file, entry) = f.find(&source.name).ok_or_else(missing)?;
                let each = entry.dtype.bytes().ok_or_else(missing)? as u64;
                file.read(entry, row * source.cols * each, out)
            }
            Self::Synthetic(s) => {
                s.read(source, row, out);
                Ok(())
            }
        }
    }

    /// The text of a file beside the weights, `None` if there is none.
    ///
    /// # Errors
    /// If it cannot be read, is too long or is not UTF-8.
    pub fn text(&self, file: &str) -> Result<Option<String>> {
        match self {
            Self::Folder(f) => read_side_file(&f.dir.join(file)),
            Self::Synthetic(s) => Ok(s.text(file).map(str::to_string)),
        }
    }

    /// A JSON file beside the weights, `None` if there is none.
    ///
    /// # Errors
    /// As [`Checkpoint::text`], or if it is not the JSON that `T` wants.
    pub fn json_opt<T: DeserializeOwned>(&self, file: &str) -> Result<Option<T>> {
        self.text(file)?.map(|t| parse_json(&self.place(file), &t)).transpose()
    }

    /// A JSON file beside the weights.
    ///
    /// # Errors
    /// As [`Checkpoint::json_opt`], or if there is none.
    pub fn json<T: DeserializeOwned>(&self, file: &str) -> Result<T> {
        self.json_opt(file)?.ok_or_else(|| {
            Error::input(self.place(file).display(), "no such file", "it beside the weights: download it")
        })
    }

    /// What errors call the file `file`.
    fn place(&self, file: &str) -> PathBuf {
        match self {
            Self::Folder(f) => f.dir.join(file),
            Self::Synthetic(_) => PathBuf::from(file),
        }
    }
}

fn parse_json<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| Error::Input(format!("{}: {}", path.display(), shown(e.to_string()))))
}

fn read_side_file(path: &Path) -> Result<Option<String>> {
    let file = match File::open(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        r => r.map_err(|e| Error::io("open", path, &e))?,
    };
    let mut bytes = Vec::new();
    file.take(SIDE_FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|e| Error::io("read", path, &e))?;
    if bytes.len() as u64 > SIDE_FILE_BYTES_MAX {
        return Err(Error::input(path.display(), "a longer file", format!("at most {SIDE_FILE_BYTES_MAX} bytes")));
    }
    String::from_utf8(bytes).map(Some).map_err(|_| Error::input(path.display(), "bytes that are not UTF-8", "UTF-8"))
}
