//! What a run of the text model did, and its comparison with the reference: logits, router choices.
//!
//! The tolerances of all golden tests are here, with their reasons.

use crate::golden::{Goldens, max_abs, max_diff};
use forerun_engine::{Observer, sampler::argmax};

/// Share of the largest logit by which any logit may differ: f32 sums of a few hundred terms in another order through
/// eight layers leave about 1e-5; 1e-3 is what the project promises.
pub const LOGIT_TOLERANCE: f32 = 1e-3;

/// Relative error of hidden states and visual features, for the same reason.
pub const HIDDEN_TOLERANCE: f32 = 1e-3;

/// Difference of a router weight, which is at most 1, and of a log-sum-exp, for the same reason.
pub const WEIGHT_TOLERANCE: f32 = 1e-3;

/// Everything an [`Observer`] hears.
#[derive(Default)]
pub struct Record {
    /// Input of each layer, then the last one's output: `[layers + 1][tokens * hidden]`.
    pub hidden: Vec<Vec<f32>>,
    /// Input of each layer's router: `[layers][tokens * hidden]`.
    pub router_in: Vec<Vec<f32>>,
    /// Experts and weights: `[layers][tokens]`.
    pub routed: Vec<Vec<(Vec<u16>, Vec<f32>)>>,
    /// Logits: `[tokens][vocab]`.
    pub logits: Vec<Vec<f32>>,
}

fn at<T: Default>(v: &mut Vec<T>, i: usize) -> &mut T {
    if v.len() <= i {
        v.resize_with(i + 1, T::default);
    }
    &mut v[i]
}

impl Observer for Record {
    fn wants_all_logits(&self) -> bool {
        true
    }

    fn hidden(&mut self, layer: usize, _first: usize, x: &[f32]) {
        at(&mut self.hidden, layer).extend_from_slice(x);
    }

    fn router_input(&mut self, layer: usize, _first: usize, x: &[f32]) {
        at(&mut self.router_in, layer).extend_from_slice(x);
    }

    fn routed(&mut self, layer: usize, _token: usize, experts: &[u16], weights: &[f32]) {
        at(&mut self.routed, layer).push((experts.to_vec(), weights.to_vec()));
    }

    fn logits(&mut self, _token: usize, logits: &[f32]) {
        self.logits.push(logits.to_vec());
    }
}

impl Record {
    /// Largest difference of a logit from the reference: of all logits of the last four tokens as a share of the largest
    /// one, of the ten largest of every token as a share of that token's largest.
    pub fn logit_error(&self, g: &Goldens) -> f32 {
        let last = g.f32("logits_last");
        let vocab = last.len() / 4;
        let (top, idx) = (g.f32("top10_val"), g.i32("top10_idx"));
        assert_eq!(top.len(), self.logits.len() * 10);
        let mut worst = 0f32;
        for (want, got) in last.chunks(vocab).zip(&self.logits[self.logits.len() - 4..]) {
            worst = worst.max(max_diff(got, want) / max_abs(want));
        }
        for (t, got) in self.logits.iter().enumerate() {
            for i in t * 10..t * 10 + 10 {
                worst = worst.max((got[idx[i] as usize] - top[i]).abs() / top[t * 10].abs());
            }
        }
        worst
    }

    /// Requires the reference's likeliest token, log-sum-exp and logits at every token. Returns [`Record::logit_error`].
    ///
    /// # Panics
    /// If one differs.
    pub fn check_logits(&self, name: &str, g: &Goldens) -> f32 {
        let last = g.f32("logits_last");
        for (want, got) in last.chunks(last.len() / 4).zip(&self.logits[self.logits.len() - 4..]) {
            assert_eq!(argmax(got), argmax(want), "{name}: argmax");
        }
        let (idx, sums) = (g.i32("top10_idx"), g.f32("logsumexp"));
        assert_eq!(sums.len(), self.logits.len());
        for (t, got) in self.logits.iter().enumerate() {
            assert_eq!(argmax(got), idx[t * 10] as u32, "{name}: argmax of token {t}");
            let sum = log_sum_exp(got) as f32;
            let close = (sum - sums[t]).abs() < WEIGHT_TOLERANCE;
            assert!(close, "{name}: logsumexp of token {t}: {sum}, expected {}", sums[t]);
        }
        let worst = self.logit_error(g);
        assert!(worst < LOGIT_TOLERANCE, "{name}: logits differ by {worst} of the largest");
        worst
    }

    /// Requires the reference's experts in its order, and its weights, at every token of every layer. Dense models have
    /// none.
    ///
    /// # Panics
    /// If one differs.
    pub fn check_routed(&self, name: &str, g: &Goldens) {
        if !g.has("router_idx") {
            assert!(self.routed.is_empty(), "{name}: a dense model chose experts");
            return;
        }
        let (idx, weights) = (g.i32("router_idx"), g.f32("router_weight"));
        let k = self.routed[0][0].0.len();
        assert_eq!(self.routed.iter().map(Vec::len).sum::<usize>() * k, idx.len(), "{name}: choices");
        for (i, (experts, w)) in self.routed.iter().flatten().enumerate() {
            let want: Vec<u16> = idx[i * k..][..k].iter().map(|&e| e as u16).collect();
            assert_eq!(experts, &want, "{name}: choice {i}");
            assert!(max_diff(w, &weights[i * k..][..k]) < WEIGHT_TOLERANCE, "{name}: weights of choice {i}");
        }
    }
}

/// `ln(sum(exp(x)))`; logits are far below the range of f64's exponential.
pub fn log_sum_exp(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln()
}
