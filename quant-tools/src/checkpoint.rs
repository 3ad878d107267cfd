//! A checkpoint folder as one set of tensors: `model.safetensors`, or the shards that `model.safetensors.index.json`
//! names, and the JSON files beside them. Only headers and small files are held in memory.

use crate::error::{Error, Result};
use crate::safetensors::{Entry, SafeTensors};
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

/// An opened checkpoint folder.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<SafeTensors>,
    by_name: BTreeMap<String, usize>,
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
        Ok(Self { dir: dir.to_path_buf(), shards, by_name })
    }

    /// All tensor names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// The tensor `name` and the shard that holds it.
    pub fn find(&self, name: &str) -> Option<(&SafeTensors, &Entry)> {
        let shard = &self.shards[*self.by_name.get(name)?];
        shard.entries().get(name).map(|e| (shard, e))
    }

    /// The tensor `name`, which must have `shape` (PyTorch's order) and a type that can be packed.
    ///
    /// # Errors
    /// If it is missing or differs.
    pub fn expect(&self, name: &str, shape: &[u64]) -> Result<&Entry> {
        let Some((_, e)) = self.find(name) else {
            return Err(Error::input(format!("tensor {name}"), "none in the checkpoint", format!("shape {shape:?}")));
        };
        if e.shape != shape {
            let found = &e.shape[..e.shape.len().min(8)];
            return Err(Error::input(format!("tensor {name}"), format!("{found:?}"), format!("{shape:?}")));
        }
        if e.dtype.bytes().is_none() {
            return Err(Error::input(format!("tensor {name}"), format!("type {}", e.dtype), "BF16, F16 or F32"));
        }
        Ok(e)
    }

    /// The text of a file beside the weights, `None` if there is none.
    ///
    /// # Errors
    /// If it cannot be read, is too long or is not UTF-8.
    pub fn text(&self, file: &str) -> Result<Option<String>> {
        read_side_file(&self.dir.join(file))
    }

    /// A JSON file beside the weights, `None` if there is none.
    ///
    /// # Errors
    /// As [`Checkpoint::text`], or if it is not the JSON that `T` wants.
    pub fn json_opt<T: DeserializeOwned>(&self, file: &str) -> Result<Option<T>> {
        let path = self.dir.join(file);
        read_side_file(&path)?.map(|t| parse_json(&path, &t)).transpose()
    }

    /// A JSON file beside the weights.
    ///
    /// # Errors
    /// As [`Checkpoint::json_opt`], or if there is none.
    pub fn json<T: DeserializeOwned>(&self, file: &str) -> Result<T> {
        self.json_opt(file)?.ok_or_else(|| {
            Error::input(self.dir.join(file).display(), "no such file", "it beside the weights: download it")
        })
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
