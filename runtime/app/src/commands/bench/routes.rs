//! Made-up routes for measuring: experts chosen at random, some of them those of the token before, and a given share of them
//! foreseen. Always the same for the same numbers.

use forerun_engine::Observer;
use forerun_engine::router::TOP_K_MAX;

/// Takes the router's place.
pub struct Routes {
    /// Experts of a layer.
    pub experts: usize,
    /// Share of a token's experts that are those of the token before, 0 to 1.
    pub reuse: f64,
    /// Share of the candidates that are right, 0 to 1.
    pub recall: f64,
    /// Makes other routes.
    pub round: usize,
}

impl Routes {
    /// A number that looks random, 0 to 2^32 - 1.
    fn number(&self, layer: usize, token: usize, rank: usize, what: u64) -> u64 {
        let mut x = self.round as u64;
        for part in [layer as u64, token as u64, rank as u64, what] {
            x = (x ^ part).wrapping_add(0x9E37_79B9_7F4A_7C15);
            x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            x ^= x >> 31;
        }
        x >> 32
    }

    fn chance(&self, layer: usize, token: usize, rank: usize, what: u64, share: f64) -> bool {
        (self.number(layer, token, rank, what) as f64) < share * (1u64 << 32) as f64
    }

    /// Experts of a token.
    fn choose(&self, layer: usize, token: usize, out: &mut [u16]) {
        for rank in 0..out.len() {
            let mut from = token;
            while from > 0 && self.chance(layer, from, rank, 0, self.reuse) {
                from -= 1;
            }
            let e = self.number(layer, from, rank, 1) % self.experts as u64;
            out[rank] = self.free(e as u16, &out[..rank]);
        }
    }

    /// The first expert from `e` on that is not in `taken`, which are fewer than there are experts.
    fn free(&self, mut e: u16, taken: &[u16]) -> u16 {
        while taken.contains(&e) {
            e = (e + 1) % self.experts as u16;
        }
        e
    }
}

impl Observer for Routes {
    fn reroute(&mut self, layer: usize, token: usize, experts: &mut [u16]) {
        self.choose(layer, token, experts);
    }

    fn foresee(&mut self, layer: usize, token: usize, candidates: &mut [u16]) {
        let mut right = [0u16; TOP_K_MAX];
        // Twice as many candidates as experts are chosen: see the engine's lookahead.
        let right = &mut right[..(candidates.len() / 2).min(TOP_K_MAX)];
        self.choose(layer, token, right);
        for rank in 0..candidates.len() {
            let wrong = (self.number(layer, token, rank, 2) % self.experts as u64) as u16;
            candidates[rank] = match right.get(rank) {
                Some(&e) if self.chance(layer, token, rank, 3, self.recall) => e,
                _ => {
                    let e = self.free(wrong, right);
                    if candidates[..rank].contains(&e) { wrong } else { e }
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuse_and_recall_are_what_was_asked_for() {
        let mut r = Routes { experts: 256, reuse: 0.5, recall: 0.8, round: 3 };
        let (mut same, mut right) = (0, 0);
        let mut last = [0; 8];
        for token in 0..1000 {
            let (mut chosen, mut candidates) = ([0; 8], [0; 16]);
            r.reroute(7, token, &mut chosen);
            r.foresee(7, token, &mut candidates);
            let mut sorted = chosen;
            sorted.sort_unstable();
            assert!(sorted.windows(2).all(|w| w[0] < w[1]) && sorted[7] < 256, "{chosen:?}");
            same += chosen.iter().filter(|e| last.contains(e)).count();
            right += candidates[..8].iter().filter(|e| chosen.contains(e)).count();
            last = chosen;
        }
        assert!((3900..4400).contains(&same), "{same} of 8000");
        assert!((6200..6700).contains(&right), "{right} of 8000");
    }
}
