//! Builds a GGUF header. The order of keys and tensors is the caller's, so equal input gives equal bytes.

use super::{MAGIC, NAME_MAX, VERSION, kind};
use crate::{BlockType, FormatError, PAGE, page_up};
use alloc::{format, string::String, vec::Vec};

/// A metadata value to write.
#[derive(Debug, Clone, PartialEq)]
pub enum Kv {
    /// u32.
    U32(u32),
    /// i32 array.
    I32s(Vec<i32>),
    /// u8 array.
    U8s(Vec<u8>),
    /// u32 array.
    U32s(Vec<u32>),
    /// f32.
    F32(f32),
    /// f32 array.
    F32s(Vec<f32>),
    /// bool.
    Bool(bool),
    /// string.
    Str(String),
    /// string array.
    Strs(Vec<String>),
}

/// Collects metadata and the tensor directory of a packed file, whose alignment is [`PAGE`].
#[derive(Debug, Default)]
pub struct HeaderBuilder {
    kv: Vec<(String, Kv)>,
    tensors: Vec<(String, BlockType, Vec<u64>, u64)>,
    data_bytes: u64,
}

impl HeaderBuilder {
    /// Starts an empty header with `general.alignment` set.
    pub fn new() -> Self {
        let mut h = Self::default();
        h.set("general.alignment", Kv::U32(PAGE as u32));
        h
    }

    /// Sets `key`. Setting it again replaces the value in place, so a checksum array can be filled in at the end
    /// without moving any byte.
    pub fn set(&mut self, key: &str, value: Kv) {
        match self.kv.iter_mut().find(|(k, _)| k == key) {
            Some((_, v)) => *v = value,
            None => self.kv.push((key.into(), value)),
        }
    }

    /// Adds a tensor after the last one and returns its offset from the start of the data section. `ne` is contiguous
    /// axis first.
    ///
    /// # Errors
    /// If the name is too long, the row is not whole blocks, or a size overflows.
    pub fn tensor(&mut self, name: &str, block: BlockType, ne: &[u64]) -> Result<u64, FormatError> {
        if name.len() >= NAME_MAX || ne.is_empty() || ne.len() > 4 {
            return Err(FormatError::invalid(
                format!("tensor {name}"),
                format!("{ne:?}"),
                "a name under 64 bytes, 1 to 4 axes",
            ));
        }
        let bytes = ne[1..].iter().try_fold(block.row_bytes(ne[0])?, |b, &n| b.checked_mul(n));
        let end = bytes.and_then(page_up).and_then(|b| self.data_bytes.checked_add(b)).ok_or_else(|| {
            FormatError::invalid(format!("tensor {name}"), format!("{ne:?}"), "a size that fits 64 bits")
        })?;
        let offset = core::mem::replace(&mut self.data_bytes, end);
        self.tensors.push((name.into(), block, ne.to_vec(), offset));
        Ok(offset)
    }

    /// Bytes of the data section, padding included.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Number of tensors so far.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// The header's bytes, padded to [`PAGE`]: the data section starts right after them.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        out.extend_from_slice(&(self.kv.len() as u64).to_le_bytes());
        for (key, value) in &self.kv {
            put_str(&mut out, key);
            put_value(&mut out, value);
        }
        for (name, block, ne, offset) in &self.tensors {
            put_str(&mut out, name);
            out.extend_from_slice(&(ne.len() as u32).to_le_bytes());
            for n in ne {
                out.extend_from_slice(&n.to_le_bytes());
            }
            out.extend_from_slice(&(*block as u32).to_le_bytes());
            out.extend_from_slice(&offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(PAGE as usize), 0);
        out
    }
}

fn put_str(out: &mut Vec<u8>, s: &str) {
    out.extend_from_slice(&(s.len() as u64).to_le_bytes());
    out.extend_from_slice(s.as_bytes());
}

fn put_array<T>(out: &mut Vec<u8>, kind: u32, items: &[T], mut put: impl FnMut(&mut Vec<u8>, &T)) {
    out.extend_from_slice(&kind::ARRAY.to_le_bytes());
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&(items.len() as u64).to_le_bytes());
    for i in items {
        put(out, i);
    }
}

fn put_value(out: &mut Vec<u8>, value: &Kv) {
    let mut scalar = |kind: u32, bytes: &[u8]| {
        out.extend_from_slice(&kind.to_le_bytes());
        out.extend_from_slice(bytes);
    };
    match value {
        Kv::U32(x) => scalar(kind::U32, &x.to_le_bytes()),
        Kv::F32(x) => scalar(kind::F32, &x.to_le_bytes()),
        Kv::Bool(x) => scalar(kind::BOOL, &[u8::from(*x)]),
        Kv::Str(s) => {
            out.extend_from_slice(&kind::STRING.to_le_bytes());
            put_str(out, s);
        }
        Kv::I32s(v) => put_array(out, kind::I32, v, |o, x| o.extend_from_slice(&x.to_le_bytes())),
        Kv::U8s(v) => put_array(out, kind::U8, v, |o, x| o.push(*x)),
        Kv::U32s(v) => put_array(out, kind::U32, v, |o, x| o.extend_from_slice(&x.to_le_bytes())),
        Kv::F32s(v) => put_array(out, kind::F32, v, |o, x| o.extend_from_slice(&x.to_le_bytes())),
        Kv::Strs(v) => put_array(out, kind::STRING, v, |o, s| put_str(o, s)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Header, Value};
    use super::*;
    use alloc::string::ToString;
    use alloc::vec;

    fn sample() -> HeaderBuilder {
        let mut h = HeaderBuilder::new();
        h.set("a.u32", Kv::U32(7));
        h.set("a.f32", Kv::F32(0.5));
        h.set("a.names", Kv::Strs(vec!["x".to_string(), "yé".to_string()]));
        h.set("a.sums", Kv::U32s(vec![0, 0]));
        h.set("a.yes", Kv::Bool(true));
        h.tensor("t.one", BlockType::Q8_0, &[64, 3]).unwrap();
        h.tensor("t.two", BlockType::F32, &[5]).unwrap();
        h
    }

    #[test]
    fn what_is_written_is_read() {
        let mut h = sample();
        let before = h.bytes().len();
        h.set("a.sums", Kv::U32s(vec![1, 2]));
        let bytes = h.bytes();
        assert_eq!(bytes.len(), before);
        let file_bytes = bytes.len() as u64 + h.data_bytes();
        let r = Header::parse(&bytes, file_bytes).unwrap();
        assert_eq!(r.u32("a.u32"), Ok(7));
        assert_eq!(r.f32("a.f32"), Ok(0.5));
        assert_eq!(r.bool_opt("a.yes"), Ok(Some(true)));
        assert_eq!(r.u32_array("a.sums", 2), Ok(vec![1, 2]));
        let names: Vec<_> = r.array("a.names").unwrap().iter().collect();
        assert_eq!(names, [Value::Str("x"), Value::Str("yé")]);
        assert_eq!(r.data_offset, bytes.len() as u64);
        let t = r.tensor("t.two").unwrap();
        assert_eq!((t.offset, t.bytes, t.ne), (r.data_offset + PAGE, 20, [5, 1, 1, 1]));
    }

    #[test]
    fn a_name_that_comes_twice_is_refused() {
        let mut h = sample();
        h.tensor("t.one", BlockType::F32, &[1]).unwrap();
        let bytes = h.bytes();
        let e = Header::parse(&bytes, bytes.len() as u64 + h.data_bytes()).unwrap_err().to_string();
        assert!(e.starts_with("tensor t.one: found it twice"), "{e}");
    }

    #[test]
    fn an_array_in_the_wrong_place_is_named_not_printed() {
        let mut h = sample();
        h.set("general.alignment", Kv::U32s(vec![7; 100_000]));
        let bytes = h.bytes();
        let e = Header::parse(&bytes, bytes.len() as u64 + h.data_bytes()).unwrap_err().to_string();
        assert!(e.contains("an array of 100000 elements of GGUF type 4), expected a power of two"), "{e}");
    }

    #[test]
    fn every_prefix_is_refused_without_panic() {
        let h = sample();
        let bytes = h.bytes();
        let file_bytes = bytes.len() as u64 + h.data_bytes();
        let end = bytes.iter().rposition(|&b| b != 0).unwrap();
        for n in 0..end {
            assert!(Header::parse(&bytes[..n], file_bytes).is_err(), "prefix of {n} bytes was accepted");
        }
        assert!(Header::parse(&bytes, file_bytes - PAGE).is_err(), "a tensor outside the file was accepted");
    }
}
