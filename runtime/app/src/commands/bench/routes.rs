//! Made-up routes for measuring. Every expert has a score that drifts from token to token; the highest are chosen, and what is
//! foreseen are the highest of the same scores seen through noise. So wrong candidates are near misses, often in memory
//! already, and better ranks are more often right, as with a real router. Always the same for the same numbers.

use forerun_engine::Observer;
use forerun_engine::router::{TOP_K_MAX, top_k};

/// Tokens in which shares are measured, and halvings in which they are met.
const TRIAL_TOKENS: usize = 1000;
const HALVINGS: usize = 14;

/// Numbers that look random (splitmix64).
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    /// Nearly normal, mean 0, variance 1: a sum of four even ones.
    fn normal(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        let sum = (0..4).map(|i| (x >> (16 * i)) as u16 as f32 / 65536.0).sum::<f32>();
        (sum - 2.0) * 3f32.sqrt()
    }
}

/// Scores of a layer's experts.
#[derive(Debug, Clone)]
struct Scores {
    now: Vec<f32>,
    seen: Vec<f32>,
    random: Random,
    token: Option<usize>,
}

impl Scores {
    fn new(experts: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let now = (0..experts).map(|_| random.normal()).collect();
        Self { now, seen: vec![0.0; experts], random, token: None }
    }

    /// Goes on to `token`, of which the scores keep `keep` of the last one's.
    fn go_to(&mut self, token: usize, keep: f32) {
        if self.token.replace(token) != Some(token) {
            let new = (1.0 - keep * keep).sqrt();
            for x in &mut self.now {
                *x = keep * *x + new * self.random.normal();
            }
        }
    }

    fn choose(&self, out: &mut [u16]) {
        top_k(&self.now, out);
    }

    fn foresee(&mut self, noise: f32, out: &mut [u16]) {
        for (seen, x) in self.seen.iter_mut().zip(&self.now) {
            *seen = *x + noise * self.random.normal();
        }
        top_k(&self.seen, out);
    }
}

/// Experts in both.
fn common(a: &[u16], b: &[u16]) -> usize {
    a.iter().filter(|e| b.contains(e)).count()
}

/// Takes the router's place.
pub struct Routes {
    layers: Vec<Scores>,
    keep: f32,
    noise: f32,
}

impl Routes {
    /// Routes of `layers` layers that choose `k` of `experts`: a share of `reuse` of a token's experts are those of the token
    /// before, and a share of `recall` of the first `k` candidates are right, as far as that can be. Another `round`, other
    /// routes.
    pub fn new(layers: usize, experts: usize, k: usize, reuse: f64, recall: f64, round: usize) -> Self {
        let k = k.min(TOP_K_MAX).min(experts);
        let keep = meet(reuse, |keep| {
            let mut s = Scores::new(experts, 1);
            let (mut last, mut same) = ([0u16; TOP_K_MAX], 0);
            for token in 0..TRIAL_TOKENS {
                let mut chosen = [0u16; TOP_K_MAX];
                s.go_to(token, keep);
                s.choose(&mut chosen[..k]);
                same += if token > 0 { common(&chosen[..k], &last[..k]) } else { 0 };
                last = chosen;
            }
            same as f64 / ((TRIAL_TOKENS - 1) * k).max(1) as f64
        });
        // From 0 to 1, the noise goes from endless to none.
        let noise = |clear: f32| (1.0 - clear) / clear.max(1e-3);
        let clear = meet(recall, |clear| {
            let mut s = Scores::new(experts, 2);
            let right = (0..TRIAL_TOKENS).map(|token| {
                let (mut chosen, mut candidates) = ([0u16; TOP_K_MAX], [0u16; TOP_K_MAX]);
                s.go_to(token, 0.0);
                s.choose(&mut chosen[..k]);
                s.foresee(noise(clear), &mut candidates[..k]);
                common(&chosen[..k], &candidates[..k])
            });
            right.sum::<usize>() as f64 / (TRIAL_TOKENS * k).max(1) as f64
        });
        let seed = |layer| ((round * layers + layer) as u64 + 3) << 32;
        Self { layers: (0..layers).map(|l| Scores::new(experts, seed(l))).collect(), keep, noise: noise(clear) }
    }
}

/// Where between 0 and 1 `share`, which rises, is `wanted`.
fn meet(wanted: f64, share: impl Fn(f32) -> f64) -> f32 {
    let (mut low, mut high) = (0f32, 1f32);
    if wanted <= 0.0 || wanted >= 1.0 {
        return if wanted <= 0.0 { low } else { high };
    }
    for _ in 0..HALVINGS {
        let mid = f32::midpoint(low, high);
        if share(mid) < wanted {
            low = mid;
        } else {
            high = mid;
        }
    }
    f32::midpoint(low, high)
}

impl Observer for Routes {
    fn reroute(&mut self, layer: usize, token: usize, experts: &mut [u16]) {
        let s = &mut self.layers[layer];
        s.go_to(token, self.keep);
        s.choose(experts);
    }

    fn foresee(&mut self, layer: usize, token: usize, candidates: &mut [u16]) {
        let s = &mut self.layers[layer];
        s.go_to(token, self.keep);
        s.foresee(self.noise, candidates);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuse_and_recall_are_what_was_asked_for() {
        for (reuse, recall) in [(0.5, 0.8), (0.7, 1.0), (0.0, 0.5)] {
            let mut r = Routes::new(40, 256, 8, reuse, recall, 3);
            let (mut same, mut right) = (0, 0);
            let mut last = [0; 8];
            for token in 0..1000 {
                let (mut chosen, mut candidates) = ([0; 8], [0; 16]);
                r.foresee(7, token, &mut candidates);
                r.reroute(7, token, &mut chosen);
                same += common(&chosen, &last);
                right += common(&candidates[..8], &chosen);
                last = chosen;
            }
            let share = |n: usize| n as f64 / 8000.0;
            // Chance alone gives 8 of 256. Scores that drift are as good as fewer of them, which the margin allows for.
            assert!((share(same) - f64::max(reuse, 0.03)).abs() < 0.04, "{} for {reuse}", share(same));
            assert!((share(right) - recall).abs() < 0.04, "{} for {recall}", share(right));
        }
    }
}
