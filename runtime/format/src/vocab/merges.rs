//! Merges, sorted by the tokens that they join.

use super::Tokens;
use crate::{FormatError, keys};
use alloc::{format, vec, vec::Vec};

/// A merge with some left token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Merge {
    right: u32,
    rank: u32,
    merged: u32,
}

/// The merges of each left token, sorted by the right one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Merges {
    rows: Vec<Merge>,
    /// Where the rows of each left token begin, `[tokens + 1]`.
    starts: Vec<u32>,
}

impl Merges {
    /// Sorts merges of `tokens`, which come in order of rank as left token, right token, result.
    pub fn new(
        tokens: Tokens<'_>,
        triples: impl ExactSizeIterator<Item = [u32; 3]> + Clone,
    ) -> Result<Self, FormatError> {
        if triples.len() > u32::MAX as usize {
            return Err(FormatError::invalid(keys::VOCAB_MERGES, format!("{} merges", triples.len()), "under 2^32"));
        }
        let mut starts = vec![0u32; tokens.ends.len() + 1];
        for (rank, [left, right, merged]) in triples.clone().enumerate() {
            let bytes = |id| tokens.get(id).map(|(bytes, _)| bytes).filter(|bytes| !bytes.is_empty());
            let fits = match (bytes(left), bytes(right), bytes(merged)) {
                (Some(l), Some(r), Some(m)) => m.strip_prefix(l) == Some(r),
                _ => false,
            };
            if !fits {
                return Err(FormatError::invalid(
                    format!("merge {rank}"),
                    format!("tokens {left} and {right} giving {merged}"),
                    format!("tokens below {}, the third the other two joined", tokens.ends.len()),
                ));
            }
            starts[left as usize + 1] += 1;
        }
        for i in 1..starts.len() {
            starts[i] += starts[i - 1];
        }

        let mut rows = vec![Merge::default(); triples.len()];
        // Where the next row of each left token goes: its start for now, the next one's in the end.
        for (rank, [left, right, merged]) in triples.enumerate() {
            let at = &mut starts[left as usize];
            rows[*at as usize] = Merge { right, rank: rank as u32, merged };
            *at += 1;
        }
        starts.rotate_right(1);
        starts[0] = 0;
        for (left, bounds) in starts.windows(2).enumerate() {
            let row = &mut rows[bounds[0] as usize..bounds[1] as usize];
            row.sort_unstable_by_key(|m| m.right);
            if let Some(w) = row.windows(2).find(|w| w[0].right == w[1].right) {
                let rank = w[0].rank.max(w[1].rank);
                let found = format!("tokens {left} and {} a second time", w[0].right);
                return Err(FormatError::invalid(format!("merge {rank}"), found, "each pair once"));
            }
        }
        Ok(Self { rows, starts })
    }

    pub fn get(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        let left = left as usize;
        let (start, end) = (*self.starts.get(left)?, *self.starts.get(left + 1)?);
        let row = &self.rows[start as usize..end as usize];
        row.binary_search_by_key(&right, |m| m.right).ok().map(|i| (row[i].rank, row[i].merged))
    }

    /// Left token, right token and result of each merge, in order of rank.
    pub fn in_order(&self) -> Vec<u32> {
        let mut out = vec![0; self.rows.len() * 3];
        for (left, bounds) in self.starts.windows(2).enumerate() {
            for m in &self.rows[bounds[0] as usize..bounds[1] as usize] {
                out[m.rank as usize * 3..][..3].copy_from_slice(&[left as u32, m.right, m.merged]);
            }
        }
        out
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn heap_bytes(&self) -> usize {
        self.rows.capacity() * size_of::<Merge>() + self.starts.capacity() * size_of::<u32>()
    }
}
