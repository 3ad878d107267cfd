//! What a run of the text model did, and its comparison with the reference: logits, router choices.
//!
//! The tolerances of all golden tests are here, with their reasons.

use crate::golden::{Goldens, max_abs, max_diff};
use forerun_engine::{Observer, plan::KvType, sampler::argmax};
use std::ops::Range;

/// Share of the largest logit by which any logit may differ: f32 sums of a few hundred terms in another order through
/// eight layers leave about 1e-5, a KV cache in f16 6e-4 (keys and values lose up to 2^-12 of themselves); 1e-3 is what the
/// project promises.
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
    /// Compares logits and choices with the reference's, and prints how far the logits are.
    ///
    /// With a KV cache in f32, everything must agree. In f16, a router that finds two experts equally good may take the
    /// other one, and what follows is another computation: then logits are held to the tolerance up to that token, and the
    /// weights there must show that it was a tie.
    ///
    /// # Panics
    /// If anything differs.
    pub fn check(&self, name: &str, g: &Goldens, kv: KvType) {
        let tokens = self.logits.len();
        let until = match kv {
            KvType::F32 => {
                self.check_choices(name, g);
                tokens
            }
            KvType::F16 => self.first_tie(name, g).unwrap_or(tokens),
        };
        let (worst, rest) = (self.logit_error(g, 0..until), self.logit_error(g, until..tokens));
        let other =
            if until < tokens { format!(", {rest:.1e} from token {until} on: other expert") } else { String::new() };
        println!("{name}: KV {kv:?}: {tokens} tokens: logits within {worst:.1e} of the largest{other}");
        assert!(worst < LOGIT_TOLERANCE, "{name}: logits differ by {worst} of the largest");
    }

    /// Largest difference of a logit of `tokens` from the reference: of all logits of the last four tokens as a share of the
    /// largest one, of the ten largest of every token as a share of that token's largest.
    fn logit_error(&self, g: &Goldens, tokens: Range<usize>) -> f32 {
        let last = g.f32("logits_last");
        let (top, idx) = (g.f32("top10_val"), g.i32("top10_idx"));
        assert_eq!(top.len(), self.logits.len() * 10);
        let mut worst = 0f32;
        for (t, want) in (self.logits.len() - 4..).zip(last.chunks(last.len() / 4)) {
            if tokens.contains(&t) {
                worst = worst.max(max_diff(&self.logits[t], want) / max_abs(want));
            }
        }
        for t in tokens {
            for i in t * 10..t * 10 + 10 {
                worst = worst.max((self.logits[t][idx[i] as usize] - top[i]).abs() / top[t * 10].abs());
            }
        }
        worst
    }

    /// The first token of which a layer took other experts than the reference, where that was a tie.
    fn first_tie(&self, name: &str, g: &Goldens) -> Option<usize> {
        let sorted = |e: &[u16]| {
            let mut e = e.to_vec();
            e.sort_unstable();
            e
        };
        let choices = Choices::of(g)?;
        let tokens = self.logits.len();
        let (t, l) = (0..tokens)
            .flat_map(|t| (0..self.routed.len()).map(move |l| (t, l)))
            .find(|&(t, l)| sorted(&self.routed[l][t].0) != sorted(&choices.at(l * tokens + t).0))?;
        let difference = max_diff(&self.routed[l][t].1, &choices.at(l * tokens + t).1);
        assert!(difference < WEIGHT_TOLERANCE, "{name}: layer {l} chose other experts for token {t}: {difference}");
        Some(t)
    }

    /// Requires the reference's likeliest token and log-sum-exp at every token; of a mixture also its experts, in its
    /// order, and their weights, at every token of every layer.
    ///
    /// # Panics
    /// If one differs.
    fn check_choices(&self, name: &str, g: &Goldens) {
        let last = g.f32("logits_last");
        for (want, got) in last.chunks(last.len() / 4).zip(&self.logits[self.logits.len() - 4..]) {
            assert_eq!(argmax(got), argmax(want), "{name}: argmax");
        }
        let (top, sums) = (g.i32("top10_idx"), g.f32("logsumexp"));
        assert_eq!(sums.len(), self.logits.len());
        for (t, got) in self.logits.iter().enumerate() {
            assert_eq!(argmax(got), top[t * 10] as u32, "{name}: argmax of token {t}");
            let sum = log_sum_exp(got) as f32;
            let close = (sum - sums[t]).abs() < WEIGHT_TOLERANCE;
            assert!(close, "{name}: logsumexp of token {t}: {sum}, expected {}", sums[t]);
        }
        let Some(choices) = Choices::of(g) else {
            assert!(self.routed.is_empty(), "{name}: a dense model chose experts");
            return;
        };
        assert_eq!(self.routed.iter().map(Vec::len).sum::<usize>(), choices.len(), "{name}: choices");
        for (i, (experts, weights)) in self.routed.iter().flatten().enumerate() {
            let want = choices.at(i);
            assert_eq!(experts, &want.0, "{name}: choice {i}");
            assert!(max_diff(weights, &want.1) < WEIGHT_TOLERANCE, "{name}: weights of choice {i}");
        }
    }
}

/// The reference's experts and weights, `[layers * tokens]`, largest weight first.
struct Choices {
    k: usize,
    experts: Vec<i32>,
    weights: Vec<f32>,
}

impl Choices {
    /// `None` for a dense model.
    fn of(g: &Goldens) -> Option<Self> {
        g.has("router_idx").then(|| Self {
            k: g.shape("router_idx")[2],
            experts: g.i32("router_idx"),
            weights: g.f32("router_weight"),
        })
    }

    fn len(&self) -> usize {
        self.experts.len() / self.k
    }

    fn at(&self, i: usize) -> (Vec<u16>, Vec<f32>) {
        let here = i * self.k..(i + 1) * self.k;
        (self.experts[here.clone()].iter().map(|&e| e as u16).collect(), self.weights[here].to_vec())
    }
}

/// `ln(sum(exp(x)))`; logits are far below the range of f64's exponential.
pub fn log_sum_exp(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln()
}
