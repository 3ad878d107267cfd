//! Added tokens in a text: the first place where one begins, and the longest one there.

use forerun_format::{
    FormatError,
    vocab::{Kind, Vocab},
};

/// Most added tokens a file may have (the real one has about fifty) and the longest one in bytes: a text is compared with
/// a few of them wherever one might begin.
const ADDED_MAX: usize = 4096;
const ADDED_BYTES_MAX: usize = 256;

/// An added token, and the longest other one that it begins with, as an index.
#[derive(Clone, Copy)]
struct Entry {
    id: u32,
    shorter: Option<u32>,
}

/// All added tokens of a vocabulary.
pub(super) struct Added {
    /// Sorted by their bytes.
    entries: Vec<Entry>,
    /// Whether one begins with this byte.
    first: [bool; 256],
}

impl Added {
    pub fn new(vocab: &Vocab) -> Result<Self, FormatError> {
        let (mut entries, mut first) = (Vec::new(), [false; 256]);
        for id in 0..vocab.len() as u32 {
            let Some((bytes, Kind::Control | Kind::Plain)) = vocab.token(id) else { continue };
            if entries.len() == ADDED_MAX || bytes.len() > ADDED_BYTES_MAX {
                return Err(FormatError::invalid(
                    format!("added token {id}"),
                    format!("number {} with {} bytes", entries.len() + 1, bytes.len()),
                    format!("at most {ADDED_MAX}, of up to {ADDED_BYTES_MAX} bytes each"),
                ));
            }
            // Places where they are found are then between characters.
            if std::str::from_utf8(bytes).is_err() {
                return Err(FormatError::invalid(format!("added token {id}"), format!("{bytes:02x?}"), "UTF-8"));
            }
            entries.push(Entry { id, shorter: None });
            first[usize::from(bytes[0])] = true;
        }
        entries.sort_unstable_by_key(|e| bytes_of(vocab, e));
        // The entries that the one at hand begins with; what stands between them in the order begins with them too.
        let mut open: Vec<usize> = Vec::new();
        for i in 0..entries.len() {
            let bytes = bytes_of(vocab, &entries[i]);
            while open.pop_if(|&mut j| !bytes.starts_with(bytes_of(vocab, &entries[j]))).is_some() {}
            if let Some(&j) = open.last() {
                if bytes_of(vocab, &entries[j]) == bytes {
                    return Err(FormatError::invalid(
                        format!("token {}", entries[i].id),
                        format!("{:?}, which is token {} too", String::from_utf8_lossy(bytes), entries[j].id),
                        "each text once",
                    ));
                }
                entries[i].shorter = Some(j as u32);
            }
            open.push(i);
        }
        Ok(Self { entries, first })
    }

    /// Where in `text` the first added token begins, its id, and its length.
    pub fn find(&self, vocab: &Vocab, text: &[u8]) -> Option<(usize, u32, usize)> {
        let starts = text.iter().enumerate().filter(|&(_, &b)| self.first[usize::from(b)]);
        starts.map(|(at, _)| at).find_map(|at| self.longest(vocab, &text[at..]).map(|(id, len)| (at, id, len)))
    }

    /// The longest added token that `text` begins with, and its length.
    pub fn longest(&self, vocab: &Vocab, text: &[u8]) -> Option<(u32, usize)> {
        // Whatever `text` begins with is, or begins, the last entry that is not after `text`.
        let mut next = self.entries.partition_point(|e| bytes_of(vocab, e) <= text).checked_sub(1);
        while let Some(i) = next {
            let bytes = bytes_of(vocab, &self.entries[i]);
            if text.starts_with(bytes) {
                return Some((self.entries[i].id, bytes.len()));
            }
            next = self.entries[i].shorter.map(|j| j as usize);
        }
        None
    }

    pub fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }
}

fn bytes_of<'a>(vocab: &'a Vocab, entry: &Entry) -> &'a [u8] {
    vocab.token(entry.id).map_or(&[], |(bytes, _)| bytes)
}
