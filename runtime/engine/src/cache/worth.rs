//! What keeping an expert is worth: how often, and how much of late, tokens chose it, above all tokens that followed ones
//! like the present. It remembers the choices of the last [`TOKENS`] tokens and nothing else, so that an expert's past
//! outlives its slot. How the constants were found, and what they give: `docs/performance.md`.

use alloc::{vec, vec::Vec};

/// Tokens remembered.
pub const TOKENS: usize = 256;

/// A choice loses this share of its weight with each token since.
const FADE: f32 = 0.9;
/// Further weight of the last token's choices.
const LAST: f32 = 4.0;
/// Weight given to what followed tokens like the present one, all of them together.
const ALIKE: f32 = 10.0;
/// What followed two tokens later counts this much of what followed one later, and so on.
const LATER: f32 = 0.6;

/// `FADED[age]` = `FADE` to the power `age`.
const FADED: [f32; TOKENS] = {
    let mut w = [1.0; TOKENS];
    let mut age = 1;
    while age < TOKENS {
        w[age] = w[age - 1] * FADE;
        age += 1;
    }
    w
};

/// Layers, experts of each, and experts that a token uses in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Layers with experts.
    pub layers: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts of a layer that a token uses.
    pub top_k: usize,
}

/// The last tokens' choices, and what they make each expert worth.
#[derive(Debug)]
pub struct Worth {
    shape: Shape,
    /// `(layers, TOKENS, top_k)`: choices; a token's row is its number modulo `TOKENS`.
    chosen: Vec<u16>,
    /// Tokens that went through all layers.
    tokens: usize,
    /// `(TOKENS)`: choices that the remembered token shares with the present one, in the layers so far.
    shared: Vec<u32>,
    /// Choices of the present token in the layers so far.
    made: u32,
    /// `(TOKENS)`: likeness to the present token, 0 to 1.
    likeness: Vec<f32>,
    /// `(experts)`: whether the present token chose it in this layer.
    is_chosen: Vec<bool>,
    /// `(layers, experts)`
    of: Vec<f32>,
}

impl Worth {
    /// Remembers nothing yet.
    pub fn new(shape: Shape) -> Self {
        Self {
            shape,
            chosen: vec![0; shape.layers * TOKENS * shape.top_k],
            tokens: 0,
            shared: vec![0; TOKENS],
            made: 0,
            likeness: vec![0.0; TOKENS],
            is_chosen: vec![false; shape.experts],
            of: vec![0.0; shape.layers * shape.experts],
        }
    }

    /// Heap bytes of this.
    pub fn heap_bytes(shape: Shape) -> usize {
        shape.layers * TOKENS * shape.top_k * 2 + TOKENS * 8 + shape.experts + shape.layers * shape.experts * 4
    }

    /// What keeping `expert` (`layer * experts + expert`) is worth, by its layer's last choice.
    pub fn of(&self, expert: u32) -> f32 {
        self.of[expert as usize]
    }

    /// `layer` chose the experts `chosen` `(tokens, top_k)`: weighs all its experts anew.
    ///
    /// A layer costs two passes over the choices that are remembered of it, `2 * TOKENS * top_k` steps.
    pub fn choose(&mut self, layer: usize, chosen: &[u16]) {
        let Shape { experts, top_k, .. } = self.shape;
        let n = chosen.len() / top_k;
        if n == 0 {
            return;
        }
        let rows = &mut self.chosen[layer * TOKENS * top_k..][..TOKENS * top_k];
        for (i, token) in chosen.chunks_exact(top_k).enumerate().skip(n.saturating_sub(TOKENS)) {
            rows[(self.tokens + i) % TOKENS * top_k..][..top_k].copy_from_slice(token);
        }
        let present = self.tokens + n - 1;
        let known = (present + 1).min(TOKENS);
        let row = |age: usize| (present - age) % TOKENS;

        let last = &chosen[(n - 1) * top_k..][..top_k];
        last.iter().for_each(|&e| self.is_chosen[usize::from(e)] = true);
        self.made += top_k as u32;
        let mut total = 0.0;
        for age in (1..known).rev() {
            let r = row(age);
            let same = rows[r * top_k..][..top_k].iter().filter(|&&e| self.is_chosen[usize::from(e)]).count();
            self.shared[r] += same as u32;
            let share = self.shared[r] as f32 / self.made as f32;
            // To the fourth: few tokens that are much alike tell more than many that are a little.
            self.likeness[r] = share * share * (share * share);
            total += self.likeness[r];
        }
        last.iter().for_each(|&e| self.is_chosen[usize::from(e)] = false);

        let scale = if total > 0.0 { ALIKE / total } else { 0.0 };
        let of = &mut self.of[layer * experts..][..experts];
        of.fill(0.0);
        let mut followed = 0.0;
        for age in (0..known).rev() {
            let r = row(age);
            let weight = FADED[age] + scale * followed + if age == 0 { LAST } else { 0.0 };
            rows[r * top_k..][..top_k].iter().for_each(|&e| of[usize::from(e)] += weight);
            followed = followed * LATER + self.likeness[r];
        }
    }

    /// The present token, or one more of its chunk, went through all layers.
    pub fn end_token(&mut self) {
        self.tokens += 1;
        self.forget_present();
    }

    /// The present token ends here, in whatever layer it is.
    pub fn forget_present(&mut self) {
        self.shared.fill(0);
        self.made = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { layers: 2, experts: 8, top_k: 2 };

    /// One token that chooses the same in both layers.
    fn token(w: &mut Worth, chosen: [u16; 2]) {
        (0..2).for_each(|l| w.choose(l, &chosen));
        w.end_token();
    }

    #[test]
    fn later_and_more_frequent_choices_are_worth_more() {
        let mut w = Worth::new(SHAPE);
        token(&mut w, [0, 1]);
        token(&mut w, [0, 2]);
        token(&mut w, [3, 4]);
        for l in [0, 8] {
            let of = |e: u32| w.of(l + e);
            assert!(of(3) > of(0) && of(0) > of(2) && of(2) > of(1) && of(1) > of(5), "{:?}", w.of);
            assert_eq!((of(3), of(5)), (of(4), 0.0));
        }
    }

    #[test]
    fn what_followed_the_like_of_this_token_is_worth_more_than_what_came_since() {
        let mut w = Worth::new(SHAPE);
        for t in [[0, 1], [2, 3], [4, 5], [6, 7]] {
            token(&mut w, t);
        }
        assert!(w.of(2) < w.of(4));
        token(&mut w, [0, 1]);
        assert!(w.of(2) > w.of(4) && w.of(4) > w.of(6), "{:?}", w.of);
    }

    #[test]
    fn a_chunk_leaves_what_its_tokens_one_by_one_do() {
        let tokens = [[0, 1], [2, 3], [0, 4], [5, 1], [0, 1]];
        let (mut a, mut b) = (Worth::new(SHAPE), Worth::new(SHAPE));
        tokens.iter().for_each(|&t| token(&mut a, t));
        for l in 0..2 {
            b.choose(l, tokens.as_flattened());
        }
        (0..tokens.len()).for_each(|_| b.end_token());
        assert_eq!(a.of, b.of);
        // Longer than what is remembered, with a first token that must not count.
        let mut long = vec![[6, 7]];
        long.resize(TOKENS + 1, [0, 1]);
        for l in 0..2 {
            b.choose(l, long.as_flattened());
        }
        assert_eq!((b.of(6), b.of(5)), (0.0, 0.0));
    }

    #[test]
    fn an_abandoned_token_is_not_compared() {
        let (mut a, mut b) = (Worth::new(SHAPE), Worth::new(SHAPE));
        for w in [&mut a, &mut b] {
            token(w, [0, 1]);
            token(w, [2, 3]);
        }
        a.choose(0, &[0, 1]);
        a.forget_present();
        token(&mut a, [4, 5]);
        token(&mut b, [4, 5]);
        assert_eq!(a.of, b.of);
    }
}
