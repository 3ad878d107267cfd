//! Reference outputs of transformers 5.24: `tests/goldens`, described in `tests/README.md`.

use crate::path;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// One `.safetensors` file of goldens.
pub struct Goldens(Vec<u8>);

impl Goldens {
    /// Reads `tests/goldens/NAME.safetensors`.
    pub fn open(name: &str) -> Self {
        Self(std::fs::read(path(format!("goldens/{name}.safetensors"))).expect(name))
    }

    /// Whether there is a tensor called `name`.
    pub fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.0).expect("goldens").tensor(name).is_ok()
    }

    /// Shape of tensor `name`.
    pub fn shape(&self, name: &str) -> Vec<usize> {
        SafeTensors::deserialize(&self.0).expect("goldens").tensor(name).expect(name).shape().to_vec()
    }

    fn words(&self, name: &str, dtype: Dtype) -> Vec<[u8; 4]> {
        let all = SafeTensors::deserialize(&self.0).expect("goldens");
        let t = all.tensor(name).expect(name);
        assert_eq!(t.dtype(), dtype, "{name}");
        t.data().as_chunks::<4>().0.to_vec()
    }

    /// Tensor `name` as f32.
    pub fn f32(&self, name: &str) -> Vec<f32> {
        self.words(name, Dtype::F32).into_iter().map(f32::from_le_bytes).collect()
    }

    /// Tensor `name` as i32.
    pub fn i32(&self, name: &str) -> Vec<i32> {
        self.words(name, Dtype::I32).into_iter().map(i32::from_le_bytes).collect()
    }

    /// Tensor `name` as bytes.
    pub fn u8(&self, name: &str) -> Vec<u8> {
        let all = SafeTensors::deserialize(&self.0).expect("goldens");
        all.tensor(name).expect(name).data().to_vec()
    }
}

/// Reads `tests/goldens/NAME.json`.
pub fn json(name: &str) -> Value {
    let text = std::fs::read_to_string(path(format!("goldens/{name}.json"))).expect(name);
    serde_json::from_str(&text).expect(name)
}

/// Largest absolute difference.
pub fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |m, (a, b)| f32::max(m, (a - b).abs()))
}

/// Largest magnitude.
pub fn max_abs(a: &[f32]) -> f32 {
    a.iter().fold(0.0, |m, a| f32::max(m, a.abs()))
}

/// `|a - b| / |b|` in the Euclidean norm.
pub fn relative(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let d: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let n: f64 = b.iter().map(|b| f64::from(*b).powi(2)).sum();
    (d / n).sqrt() as f32
}
