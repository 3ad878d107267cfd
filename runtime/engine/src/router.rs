//! Which experts a token uses: softmax over all, the `k` largest, renormalised. Ties go to the lower index.

use forerun_kernels::math::exp;

/// Most experts a token may use.
pub const TOP_K_MAX: usize = 32;

/// Turns router `logits` into the chosen experts and their weights, largest first. `idx` and `weights` hold `k` elements.
///
/// # Panics
/// If `k` is 0, over [`TOP_K_MAX`] or over the number of logits.
pub fn choose(logits: &mut [f32], idx: &mut [u16], weights: &mut [f32]) {
    let k = idx.len();
    assert!(k > 0 && k <= TOP_K_MAX && k <= logits.len() && weights.len() == k);
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m });
    let mut sum = 0f32;
    for x in logits.iter_mut() {
        *x = exp(*x - max);
        sum += *x;
    }
    let inv = 1.0 / sum;
    logits.iter_mut().for_each(|x| *x *= inv);
    top_k(logits, idx);
    let mut total = 0f32;
    for (w, &i) in weights.iter_mut().zip(idx.iter()) {
        *w = logits[usize::from(i)];
        total += *w;
    }
    weights.iter_mut().for_each(|w| *w /= total);
}

/// Indices of the `idx.len()` largest of `x`, largest first. The order is total, so that even NaN gives distinct indices.
pub fn top_k(x: &[f32], idx: &mut [u16]) {
    let mut n = 0;
    for (i, v) in x.iter().enumerate() {
        let mut at = n;
        while at > 0 && v.total_cmp(&x[usize::from(idx[at - 1])]).is_gt() {
            at -= 1;
        }
        if at == idx.len() {
            continue;
        }
        n = (n + 1).min(idx.len());
        idx[at..n].rotate_right(1);
        idx[at] = i as u16;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_index_and_weights_sum_to_one() {
        let mut logits = [1.0, 3.0, 3.0, -2.0, 3.0, 0.0];
        let (mut idx, mut w) = ([0u16; 4], [0f32; 4]);
        choose(&mut logits, &mut idx, &mut w);
        assert_eq!(idx, [1, 2, 4, 0]);
        assert!((w.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(w[0], w[2]);
    }

    #[test]
    fn nan_still_gives_distinct_experts() {
        let mut logits = [f32::NAN; 5];
        let (mut idx, mut w) = ([9u16; 3], [0f32; 3]);
        choose(&mut logits, &mut idx, &mut w);
        assert_eq!(idx, [0, 1, 2]);
    }
}
