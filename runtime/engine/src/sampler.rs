//! Chooses the next token from logits: greedy, or temperature with top-k and top-p. Same seed, same tokens.

use alloc::vec::Vec;

/// Settings of the sampler.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 takes the largest logit.
    pub temperature: f32,
    /// Keep this many of the largest; 0 keeps all.
    pub top_k: usize,
    /// Keep the largest whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Sampler with its random state and scratch for a whole vocabulary.
#[derive(Debug)]
pub struct Sampler {
    settings: Sampling,
    state: u64,
    order: Vec<u32>,
    probs: Vec<f32>,
}

/// Index of the largest logit, the lowest of equals.
pub fn argmax(logits: &[f32]) -> u32 {
    argmax_if(logits, |_| true)
}

fn argmax_if(logits: &[f32], allowed: impl Fn(u32) -> bool) -> u32 {
    let mut best = None;
    for (i, &x) in logits.iter().enumerate() {
        if best.is_none_or(|(_, b)| x > b) && allowed(i as u32) {
            best = Some((i, x));
        }
    }
    best.map_or(0, |(i, _)| i as u32)
}

impl Sampler {
    /// A sampler for `vocab` tokens.
    pub fn new(settings: Sampling, vocab: usize) -> Self {
        let vocab = if settings.temperature > 0.0 { vocab } else { 0 };
        Self { settings, state: settings.seed, order: Vec::with_capacity(vocab), probs: Vec::with_capacity(vocab) }
    }

    /// The next token, none of `banned`: placeholders stand for pictures, and a model may not make those up.
    ///
    /// # Panics
    /// If `logits` is empty or all tokens are banned.
    pub fn sample(&mut self, logits: &[f32], banned: &[u32]) -> u32 {
        self.sample_if(logits, |id| !banned.contains(&id))
    }

    /// The next token, among those that are `allowed`: as if the others had no probability at all.
    ///
    /// # Panics
    /// If `logits` is empty or no token is allowed.
    pub fn sample_if(&mut self, logits: &[f32], allowed: impl Fn(u32) -> bool) -> u32 {
        let s = self.settings;
        if s.temperature <= 0.0 {
            return argmax_if(logits, allowed);
        }
        self.order.clear();
        self.order.extend((0..logits.len() as u32).filter(|&i| allowed(i)));
        let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let all = self.order.len();
        let keep = if s.top_k == 0 { all } else { s.top_k.min(all) };
        if keep < all {
            self.order.select_nth_unstable_by(keep - 1, by_logit);
            self.order.truncate(keep);
        }
        self.order.sort_unstable_by(by_logit);
        let max = logits[self.order[0] as usize];
        self.probs.clear();
        self.probs.extend(self.order.iter().map(|&i| libm::expf((logits[i as usize] - max) / s.temperature)));
        let total: f32 = self.probs.iter().sum();
        let mut kept = 0f32;
        let mut n = 0;
        while n < keep && (n == 0 || kept < s.top_p * total) {
            kept += self.probs[n];
            n += 1;
        }
        let mut left = self.uniform() * kept;
        for (i, p) in self.order[..n].iter().zip(&self.probs) {
            left -= p;
            if left < 0.0 {
                return *i;
            }
        }
        self.order[n - 1]
    }

    /// SplitMix64, upper 24 bits: uniform in 0..1.
    fn uniform(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u32 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(settings: Sampling, logits: &[f32]) -> Vec<f32> {
        let mut s = Sampler::new(settings, logits.len());
        let mut counts = alloc::vec![0f32; logits.len()];
        for _ in 0..20_000 {
            counts[s.sample(logits, &[]) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    /// Expected shares are softmax values; 20,000 draws scatter by under 0.004 each.
    #[test]
    fn draws_follow_the_softmax() {
        const SCATTER: f32 = 0.015;
        let logits = [2.0f32, 1.0, 0.0, -1.0];
        let base = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 7 };
        for (settings, want) in [
            (base, [0.643_9, 0.236_9, 0.087_1, 0.032_1]),
            (Sampling { temperature: 0.5, ..base }, [0.865, 0.117_1, 0.015_8, 0.002_1]),
            (Sampling { top_k: 2, ..base }, [0.731_1, 0.268_9, 0.0, 0.0]),
            (Sampling { top_p: 0.7, ..base }, [0.731_1, 0.268_9, 0.0, 0.0]),
            (Sampling { top_p: 0.1, ..base }, [1.0, 0.0, 0.0, 0.0]),
        ] {
            let got = shares(settings, &logits);
            assert!(
                got.iter().zip(want).all(|(g, w)| (g - w).abs() < SCATTER),
                "{settings:?}: {got:?}, expected {want:?}"
            );
        }
    }

    #[test]
    fn greedy_takes_the_first_of_equals_and_seeds_repeat() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
        let s = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 3 };
        let logits: Vec<f32> = (0..50).map(|i| i as f32 * 0.01).collect();
        let (mut a, mut b) = (Sampler::new(s, 50), Sampler::new(s, 50));
        assert_eq!(argmax_if(&[1.0, 3.0, 3.0], |i| i != 1), 2);
        assert!((0..1000).all(|_| a.sample(&logits, &[49, 48]) < 48));
        let mut a = Sampler::new(s, 50);
        assert!((0..100).all(|_| a.sample(&logits, &[]) == b.sample(&logits, &[])));
    }
}
