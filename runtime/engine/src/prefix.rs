//! The state after a prefix: saved on the way, gone back to, so that what follows it is all that is computed again.
//!
//! Keys and values stay valid for fewer tokens; delta-rule and convolution state only move forward, so they are copied, into
//! a place that the plan names. Never allocates. Going back changes no bit of what is computed afterwards.

use crate::engine::Engine;
use crate::ports::Storage;

/// How far a state reaches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Reach {
    /// Tokens in it.
    pub len: usize,
    /// Visual features that those tokens used.
    pub features: usize,
}

impl<S: Storage> Engine<'_, S> {
    /// Whether the plan has room for a saved state ([`crate::plan::Options::prefix`]).
    pub fn can_save(&self) -> bool {
        self.saves
    }

    /// Tokens in the saved state: the first ones of those in the state. `None` if nothing is saved.
    pub fn saved(&self) -> Option<usize> {
        self.saved.map(|s| s.len)
    }

    /// Goes back to the saved state, or forgets all tokens if nothing is saved. Visual features and the saved state stay.
    pub fn rewind(&mut self) {
        let s = &mut self.state;
        match self.saved {
            Some(_) => {
                s.delta.copy_from_slice(s.saved_delta);
                s.conv.copy_from_slice(s.saved_conv);
            }
            None => {
                s.delta.fill(0.0);
                s.conv.fill(0.0);
            }
        }
        self.reach = self.saved.unwrap_or_default();
    }

    /// Forgets all tokens and the saved state. Visual features stay: the next placeholder stands for the first of them.
    pub fn forget(&mut self) {
        self.saved = None;
        self.rewind();
    }

    /// Keeps the first `n` visual features. Tokens that used others are forgotten: the state is then the saved one, if
    /// that used none of them.
    pub fn keep_features(&mut self, n: usize) {
        if self.reach.features > n {
            self.saved = self.saved.filter(|s| s.features <= n);
            self.rewind();
        }
        self.features = self.features.min(n);
    }
}
