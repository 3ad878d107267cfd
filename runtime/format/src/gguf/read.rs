//! Reads a GGUF header from bytes. Everything is checked before use: counts against the bytes that could hold them,
//! every size product for overflow, every tensor against the file's length, names for uniqueness.

use super::{MAGIC, NAME_MAX, kind};
use crate::{BlockType, FormatError};
use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::fmt;

/// Most keys and most tensors: far above real files, small enough that a row of the directory for each is not felt.
const COUNT_MAX: u64 = 1 << 16;

/// A metadata value, borrowed from the header's bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// u8, u16, u32, u64.
    Uint(u64),
    /// i8, i16, i32, i64.
    Int(i64),
    /// f32, f64.
    Float(f64),
    /// bool.
    Bool(bool),
    /// UTF-8 text.
    Str(&'a str),
    /// Elements of one type.
    Array(Array<'a>),
}

/// An array in the metadata: its bytes were walked once, so reading elements cannot fail.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    kind: u32,
    len: usize,
    bytes: &'a [u8],
}

impl fmt::Debug for Array<'_> {
    /// Without its elements: there may be millions.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of {} elements of GGUF type {}", self.len, self.kind)
    }
}

impl<'a> Array<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut r = Reader { bytes: self.bytes, at: 0 };
        let kind = self.kind;
        (0..self.len).map_while(move |_| r.scalar(kind).ok())
    }

    /// Its elements, if they are u8.
    pub fn bytes(&self) -> Option<&'a [u8]> {
        (self.kind == kind::U8).then_some(self.bytes)
    }

    /// Its elements as the file has them, little endian, if they are u32.
    pub fn words(&self) -> Option<&'a [[u8; 4]]> {
        (self.kind == kind::U32).then_some(self.bytes.as_chunks().0)
    }
}

/// One row of the tensor directory.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor<'a> {
    /// Unique name.
    pub name: &'a str,
    /// GGUF type id; [`Tensor::block_type`] tells whether this build knows it.
    pub type_id: u32,
    /// Sizes, contiguous axis first (the reverse of PyTorch's order); unused axes are 1.
    pub ne: [u64; 4],
    /// Offset of its first byte from the start of the file.
    pub offset: u64,
    /// Bytes of data, without padding; 0 if the type is unknown to this build.
    pub bytes: u64,
}

impl Tensor<'_> {
    /// The element type.
    ///
    /// # Errors
    /// If this build has no kernels for it.
    pub fn block_type(&self) -> Result<BlockType, FormatError> {
        BlockType::from_id(self.type_id).ok_or_else(|| {
            FormatError::invalid(
                format!("type of tensor {}", self.name),
                format!("GGUF type {}", self.type_id),
                format!("one of {}", BlockType::names().collect::<Vec<_>>().join(", ")),
            )
        })
    }

    /// Sizes as text, contiguous axis first.
    pub fn shape_text(&self) -> String {
        let n = self.ne.iter().rposition(|&n| n != 1).map_or(1, |i| i + 1);
        format!("{:?}", &self.ne[..n])
    }
}

/// A parsed header. Borrows strings and arrays from the bytes given to [`Header::parse`].
#[derive(Debug)]
pub struct Header<'a> {
    kv: Vec<(&'a str, Value<'a>)>,
    tensors: Vec<Tensor<'a>>,
    /// Numbers of the tensors, sorted by name.
    by_name: Vec<usize>,
    /// Offset of the data section, in bytes from the start of the file.
    pub data_offset: u64,
    /// `general.alignment`, bytes.
    pub alignment: u64,
}

impl<'a> Header<'a> {
    /// Parses the header at the start of `bytes`, which is the beginning (or all) of a file of `file_bytes` bytes.
    ///
    /// # Errors
    /// [`FormatError::Truncated`] if the header is longer than `bytes`; call again with more. Anything else is final.
    pub fn parse(bytes: &'a [u8], file_bytes: u64) -> Result<Self, FormatError> {
        let mut r = Reader { bytes, at: 0 };
        let magic: [u8; 4] = r.array()?;
        if magic != MAGIC {
            return Err(FormatError::Magic(magic));
        }
        let version = r.u32()?;
        if !(2..=3).contains(&version) {
            return Err(FormatError::Version(version));
        }
        let tensor_count = r.u64()?;
        let kv_count = r.u64()?;
        // The shortest key-value pair is 8 + 4 + 1 bytes, the shortest tensor row 8 + 4 + 4 + 8.
        for (what, count, bytes_each) in [("metadata count", kv_count, 13), ("tensor count", tensor_count, 24)] {
            if count > COUNT_MAX {
                return Err(FormatError::invalid(what, count.to_string(), format!("at most {COUNT_MAX}")));
            }
            check_count(what, count, bytes_each, file_bytes)?;
        }

        let mut kv = Vec::new();
        for _ in 0..kv_count {
            let key = r.string(file_bytes)?;
            let value = r.value(file_bytes)?;
            kv.push((key, value));
        }
        kv.sort_unstable_by_key(|&(k, _)| k);
        if let Some(w) = kv.windows(2).find(|w| w[0].0 == w[1].0) {
            return Err(FormatError::invalid(format!("key {}", w[0].0), "it twice", "each key once"));
        }

        let alignment = match kv.iter().find(|(k, _)| *k == "general.alignment") {
            None => 32,
            Some((_, Value::Uint(a))) if a.is_power_of_two() && *a <= 1 << 20 => *a,
            Some((_, v)) => {
                return Err(FormatError::invalid("general.alignment", format!("{v:?}"), "a power of two up to 1 MiB"));
            }
        };

        let mut tensors = Vec::new();
        for _ in 0..tensor_count {
            tensors.push(r.tensor(file_bytes)?);
        }
        let data_offset = (r.at as u64).next_multiple_of(alignment);
        let mut by_name: Vec<usize> = (0..tensors.len()).collect();
        by_name.sort_unstable_by_key(|&i| tensors[i].name);
        if let Some(w) = by_name.windows(2).find(|w| tensors[w[0]].name == tensors[w[1]].name) {
            return Err(FormatError::invalid(format!("tensor {}", tensors[w[0]].name), "it twice", "each name once"));
        }
        let mut by_offset: Vec<(u64, u64, usize)> = Vec::new();
        for (i, t) in tensors.iter_mut().enumerate() {
            if t.offset % alignment != 0 {
                return Err(FormatError::invalid(
                    format!("offset of tensor {}", t.name),
                    t.offset.to_string(),
                    format!("a multiple of {alignment}"),
                ));
            }
            let end = data_offset.checked_add(t.offset).and_then(|o| {
                t.offset = o;
                o.checked_add(t.bytes)
            });
            match end {
                Some(end) if end <= file_bytes => by_offset.push((t.offset, end, i)),
                _ => {
                    return Err(FormatError::invalid(
                        format!("tensor {}", t.name),
                        format!("{} bytes at offset {} of a file of {file_bytes}", t.bytes, t.offset),
                        "data inside the file",
                    ));
                }
            }
        }
        by_offset.sort_unstable();
        if let Some(w) = by_offset.windows(2).find(|w| w[0].1 > w[1].0) {
            return Err(FormatError::invalid(
                format!("tensor {}", tensors[w[1].2].name),
                format!("data that overlaps tensor {}", tensors[w[0].2].name),
                "data of its own",
            ));
        }
        Ok(Self { kv, tensors, by_name, data_offset, alignment })
    }

    /// All tensors in directory order.
    pub fn tensors(&self) -> &[Tensor<'a>] {
        &self.tensors
    }

    /// All metadata, sorted by key.
    pub fn kv(&self) -> &[(&'a str, Value<'a>)] {
        &self.kv
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&Tensor<'a>> {
        let at = self.by_name.binary_search_by_key(&name, |&i| self.tensors[i].name).ok()?;
        self.tensors.get(self.by_name[at])
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        self.kv.binary_search_by_key(&key, |&(k, _)| k).ok().map(|i| self.kv[i].1)
    }

    /// The value of `key` as a number, `None` if the key is absent.
    ///
    /// # Errors
    /// If it is not a whole number that fits `u32`.
    pub fn u32_opt(&self, key: &str) -> Result<Option<u32>, FormatError> {
        self.get(key).map(|v| as_u32(key, v)).transpose()
    }

    /// The value of `key` as a number.
    ///
    /// # Errors
    /// If absent, or not a whole number that fits `u32`.
    pub fn u32(&self, key: &str) -> Result<u32, FormatError> {
        self.u32_opt(key)?.ok_or_else(|| FormatError::MissingKey(key.to_string()))
    }

    /// The value of `key` as a float.
    ///
    /// # Errors
    /// If absent or not a float.
    pub fn f32(&self, key: &str) -> Result<f32, FormatError> {
        match self.get(key) {
            None => Err(FormatError::MissingKey(key.to_string())),
            Some(Value::Float(x)) => Ok(x as f32),
            Some(v) => Err(wrong_kind(key, v, "a float")),
        }
    }

    /// The value of `key` as a bool, `None` if the key is absent.
    ///
    /// # Errors
    /// If it is of another type.
    pub fn bool_opt(&self, key: &str) -> Result<Option<bool>, FormatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(b)),
            Some(v) => Err(wrong_kind(key, v, "true or false")),
        }
    }

    /// The value of `key` as text, `None` if the key is absent.
    ///
    /// # Errors
    /// If it is of another type.
    pub fn str_opt(&self, key: &str) -> Result<Option<&'a str>, FormatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Str(s)) => Ok(Some(s)),
            Some(v) => Err(wrong_kind(key, v, "text")),
        }
    }

    /// The value of `key` as an array.
    ///
    /// # Errors
    /// If absent or of another type.
    pub fn array(&self, key: &str) -> Result<Array<'a>, FormatError> {
        match self.get(key) {
            None => Err(FormatError::MissingKey(key.to_string())),
            Some(Value::Array(a)) => Ok(a),
            Some(v) => Err(wrong_kind(key, v, "an array")),
        }
    }

    /// The value of `key` as an array of `len` numbers.
    ///
    /// # Errors
    /// If absent, of another length, or an element does not fit `u32`.
    pub fn u32_array(&self, key: &str, len: usize) -> Result<Vec<u32>, FormatError> {
        let a = self.array(key)?;
        if a.len() != len {
            return Err(FormatError::invalid(
                format!("key {key}"),
                format!("{} elements", a.len()),
                format!("{len} elements"),
            ));
        }
        a.iter().map(|v| as_u32(key, v)).collect()
    }
}

fn as_u32(key: &str, v: Value<'_>) -> Result<u32, FormatError> {
    match v {
        Value::Uint(n) => u32::try_from(n).ok(),
        Value::Int(n) => u32::try_from(n).ok(),
        _ => None,
    }
    .ok_or_else(|| wrong_kind(key, v, "a whole number from 0 to 4294967295"))
}

fn wrong_kind(key: &str, v: Value<'_>, expected: &str) -> FormatError {
    let mut found = format!("{v:?}");
    if let Some((cut, _)) = found.char_indices().nth(80) {
        found.truncate(cut);
        found.push('…');
    }
    FormatError::invalid(format!("key {key}"), found, expected)
}

/// Refuses a count that could not fit the file even with the smallest elements, before anything is allocated for it.
fn check_count(what: &str, count: u64, bytes_each: u64, file_bytes: u64) -> Result<(), FormatError> {
    if count > file_bytes / bytes_each {
        return Err(FormatError::invalid(
            what,
            count.to_string(),
            format!("at most {} in a file of {file_bytes} bytes", file_bytes / bytes_each),
        ));
    }
    Ok(())
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], FormatError> {
        let end = self.at.checked_add(n).ok_or(FormatError::Truncated { need: u64::MAX })?;
        let s = self.bytes.get(self.at..end).ok_or(FormatError::Truncated { need: end as u64 })?;
        self.at = end;
        Ok(s)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let mut a = [0; N];
        a.copy_from_slice(self.take(N)?);
        Ok(a)
    }

    fn u32(&mut self) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn string(&mut self, file_bytes: u64) -> Result<&'a str, FormatError> {
        let at = self.at;
        let len = self.u64()?;
        check_count("length of a string", len, 1, file_bytes)?;
        let bytes = self.take(usize::try_from(len).unwrap_or(usize::MAX))?;
        core::str::from_utf8(bytes)
            .map_err(|_| FormatError::invalid(format!("string at offset {at}"), "bytes that are not UTF-8", "UTF-8"))
    }

    fn scalar(&mut self, kind: u32) -> Result<Value<'a>, FormatError> {
        Ok(match kind {
            kind::U8 => Value::Uint(u64::from(self.array::<1>()?[0])),
            kind::I8 => Value::Int(i64::from(self.array::<1>()?[0] as i8)),
            kind::U16 => Value::Uint(u64::from(u16::from_le_bytes(self.array()?))),
            kind::I16 => Value::Int(i64::from(i16::from_le_bytes(self.array()?))),
            kind::U32 => Value::Uint(u64::from(self.u32()?)),
            kind::I32 => Value::Int(i64::from(self.u32()? as i32)),
            kind::F32 => Value::Float(f64::from(f32::from_le_bytes(self.array()?))),
            kind::BOOL => Value::Bool(self.array::<1>()?[0] != 0),
            kind::STRING => Value::Str(self.string(self.bytes.len() as u64)?),
            kind::U64 => Value::Uint(self.u64()?),
            kind::I64 => Value::Int(self.u64()? as i64),
            kind::F64 => Value::Float(f64::from_le_bytes(self.array()?)),
            _ => {
                return Err(FormatError::invalid(
                    format!("type of a value before offset {}", self.at),
                    kind.to_string(),
                    "a GGUF value type from 0 to 12",
                ));
            }
        })
    }

    fn value(&mut self, file_bytes: u64) -> Result<Value<'a>, FormatError> {
        let kind = self.u32()?;
        match kind {
            kind::STRING => self.string(file_bytes).map(Value::Str),
            kind::ARRAY => self.array_value(file_bytes),
            _ => self.scalar(kind),
        }
    }

    fn array_value(&mut self, file_bytes: u64) -> Result<Value<'a>, FormatError> {
        let kind = self.u32()?;
        let len = self.u64()?;
        let each: u64 = match kind {
            kind::U8 | kind::I8 | kind::BOOL => 1,
            kind::U16 | kind::I16 => 2,
            kind::U32 | kind::I32 | kind::F32 => 4,
            kind::U64 | kind::I64 | kind::F64 | kind::STRING => 8,
            _ => {
                return Err(FormatError::invalid(
                    format!("type of array elements before offset {}", self.at),
                    kind.to_string(),
                    "a GGUF scalar or string type",
                ));
            }
        };
        check_count("length of an array", len, each, file_bytes)?;
        let start = self.at;
        if kind == kind::STRING {
            for _ in 0..len {
                self.string(file_bytes)?;
            }
        } else {
            // No overflow: len <= file_bytes / each.
            self.take(usize::try_from(len * each).unwrap_or(usize::MAX))?;
        }
        Ok(Value::Array(Array { kind, len: len as usize, bytes: &self.bytes[start..self.at] }))
    }

    fn tensor(&mut self, file_bytes: u64) -> Result<Tensor<'a>, FormatError> {
        let name = self.string(file_bytes)?;
        if name.is_empty() || name.len() >= NAME_MAX {
            return Err(FormatError::invalid(
                "name of a tensor",
                format!("{} bytes", name.len()),
                format!("1 to {} bytes", NAME_MAX - 1),
            ));
        }
        let dims = self.u32()?;
        if dims > 4 {
            return Err(FormatError::invalid(format!("dimensions of tensor {name}"), dims.to_string(), "at most 4"));
        }
        let mut ne = [1u64; 4];
        for n in ne.iter_mut().take(dims as usize) {
            *n = self.u64()?;
        }
        let type_id = self.u32()?;
        let offset = self.u64()?;
        let bytes = match BlockType::from_id(type_id) {
            None => 0,
            Some(t) => {
                let row = t.row_bytes(ne[0])?;
                ne[1..].iter().try_fold(row, |b, &n| b.checked_mul(n)).ok_or_else(|| {
                    FormatError::invalid(
                        format!("shape of tensor {name}"),
                        format!("{ne:?}"),
                        "a size that fits 64 bits",
                    )
                })?
            }
        };
        if ne.contains(&0) {
            return Err(FormatError::invalid(format!("shape of tensor {name}"), format!("{ne:?}"), "no empty axis"));
        }
        Ok(Tensor { name, type_id, ne, offset, bytes })
    }
}
