//! Every block type against llama.cpp's compiled C, and quantizers against error bounds.

use crate::{dequantize_row, quantize_row};
use forerun_format::BlockType;
use std::vec;
use std::vec::Vec;

/// Offsets of the f16 scale and minimum of each type; they are set to 1.0 and 0.5 (MXFP4's exponent to 127).
fn pattern(block: BlockType) -> Vec<u8> {
    let mut b: Vec<u8> = (0..block.block_bytes()).map(|i| (37 * i + 11) as u8).collect();
    let (d, dmin) = match block {
        BlockType::Q4K | BlockType::Q5K => (0, Some(2)),
        BlockType::Q6K => (208, None),
        BlockType::Q3K => (108, None),
        BlockType::Q2K => (80, Some(82)),
        _ => (0, None),
    };
    if block == BlockType::Mxfp4 {
        b[0] = 127;
    } else {
        b[d..d + 2].copy_from_slice(&0x3C00u16.to_le_bytes());
        if let Some(m) = dmin {
            b[m..m + 2].copy_from_slice(&0x3800u16.to_le_bytes());
        }
    }
    b
}

/// (type, [(element, value)], sum of all), from the C functions of llama.cpp on the same bytes.
#[rustfmt::skip]
#[allow(clippy::type_complexity)]
const GOLDEN: [(BlockType, &[(usize, f32)], f32); 11] = [
    (BlockType::Q4_0, &[(0, -3.), (1, 2.), (15, -8.), (16, -3.), (17, -1.), (31, 0.)], -21.),
    (BlockType::Q8_0, &[(0, 85.), (1, 122.), (15, -128.), (16, -91.), (17, -54.), (31, -48.)], -176.),
    (BlockType::Q5_0, &[(0, 9.), (1, -2.), (15, -12.), (16, 14.), (17, 0.), (31, 1.)], 15.),
    (BlockType::Mxfp4, &[(0, 0.), (1, 3.), (15, -1.5), (16, 1.5), (17, 3.), (31, 3.)], 12.5),
    (BlockType::Iq4Nl, &[(0, -35.), (1, 25.), (15, -127.), (16, -35.), (17, -10.), (31, 1.)], -257.),
    (BlockType::Q2K, &[(0, 33.), (1, 0.), (15, 22.), (16, -1.5), (31, -1.5), (32, 7.5), (33, -2.5), (63, 6.5),
        (64, 10.5), (127, 42.), (128, 7.5), (191, -3.), (192, 15.), (255, 4.5)], 2059.),
    (BlockType::Q3K, &[(0, 81.), (1, -108.), (15, -54.), (16, -96.), (17, 128.), (31, 64.), (32, -22.), (33, 44.),
        (63, 10.), (64, 34.), (127, 72.), (128, 2.), (160, 26.), (191, 81.), (192, 100.), (255, 42.)], 958.),
    (BlockType::Q4K, &[(0, 315.5), (1, -25.5), (15, 160.5), (16, 315.5), (31, 160.5), (32, 8.), (33, 20.), (63, 40.),
        (64, 420.5), (127, 81.), (128, 423.), (160, 525.), (191, 45.), (192, 530.5), (255, 48.5)], 54440.),
    (BlockType::Q5K, &[(0, 811.5), (1, -25.5), (15, 160.5), (16, 811.5), (31, 160.5), (32, 112.), (33, -4.), (63, 80.),
        (64, 420.5), (127, -3.), (128, 1047.), (160, 165.), (191, 645.), (192, 1314.5), (255, 108.5)], 116_216.),
    (BlockType::Q6K, &[(0, -1431.), (1, 1696.), (15, -318.), (16, -432.), (17, 512.), (31, -96.), (32, 231.),
        (63, -580.), (64, -3040.), (96, -870.), (127, 1500.), (128, -351.), (160, 671.), (192, -484.), (255, -60.)], 4612.),
    (BlockType::Iq4Xs, &[(0, 65.), (1, -1.), (15, -89.), (16, 65.), (17, 35.), (31, 35.), (32, 455.), (63, -175.),
        (64, 780.), (96, 260.), (127, 196.), (128, -585.), (160, -910.), (192, -1950.), (255, -16.)], -11005.),
];

#[test]
fn blocks_decode_as_llama_cpp_does() {
    let quantized = BlockType::ALL.iter().filter(|b| b.block_elems() > 1).count();
    assert_eq!(GOLDEN.len(), quantized, "a golden for each quantized type");
    for (block, values, sum) in GOLDEN {
        let mut y = vec![0f32; block.block_elems()];
        dequantize_row(block, &pattern(block), &mut y);
        for &(i, want) in values {
            assert_eq!(y[i], want, "{} element {i}", block.name());
        }
        assert_eq!(y.iter().sum::<f32>(), sum, "sum of {}", block.name());
    }
}

fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 40) as f32 / (1u64 << 24) as f32
    };
    // A sum of four uniforms is close enough to the bell that weights have.
    (0..n).map(|_| (uniform() + uniform() + uniform() + uniform() - 2.0) * 0.05).collect()
}

/// Root mean square error over that of the weights themselves. Rounding to steps of s leaves s / √12: 32 bell-shaped
/// values span about 4 standard deviations, so 15 steps leave 0.077 and a search does a little better. The bounds stand a
/// tenth above what is measured; a wrong layout leaves an error near 1.
#[test]
fn quantizers_stay_within_their_bits() {
    let bounds = [
        (BlockType::Q8_0, 0.0055),
        (BlockType::Q6K, 0.0185),
        (BlockType::Q5K, 0.038),
        (BlockType::Q5_0, 0.0445),
        (BlockType::Q4K, 0.075),
        (BlockType::Q4_0, 0.09),
        (BlockType::Iq4Nl, 0.082),
        (BlockType::Iq4Xs, 0.083),
        (BlockType::Mxfp4, 0.12),
        (BlockType::Q3K, 0.158),
        (BlockType::Q2K, 0.295),
    ];
    for (block, bound) in bounds {
        let x = noise(3, 4096);
        let mut bytes = vec![0u8; block.row_bytes(4096).unwrap() as usize];
        let mut y = vec![0f32; 4096];
        quantize_row(block, &x, &mut bytes);
        dequantize_row(block, &bytes, &mut y);
        let error: f64 = x.iter().zip(&y).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let size: f64 = x.iter().map(|a| f64::from(*a).powi(2)).sum();
        let rms = (error / size).sqrt();
        std::println!("{}: {rms:.4}", block.name());
        assert!(rms < bound, "{}: error {rms:.4} of the weights' size, expected under {bound}", block.name());
    }
}

/// Zeros stay zeros, and denormal, huge and one-sided rows come back finite and near.
#[test]
fn quantizers_survive_extreme_rows() {
    for block in BlockType::ALL {
        let n = 512;
        let rows: [(&str, Vec<f32>); 6] = [
            ("zeros", vec![0.0; n]),
            ("denormal", vec![1e-41; n]),
            ("tiny", noise(5, n).iter().map(|x| x * 1e-7).collect()),
            ("large", noise(6, n).iter().map(|x| x * 1e4).collect()),
            ("positive", noise(7, n).iter().map(|x| x.abs()).collect()),
            ("negative", noise(8, n).iter().map(|x| -x.abs()).collect()),
        ];
        for (name, x) in rows {
            let mut bytes = vec![0u8; block.row_bytes(n as u64).unwrap() as usize];
            let mut y = vec![0f32; n];
            quantize_row(block, &x, &mut bytes);
            dequantize_row(block, &bytes, &mut y);
            let max = x.iter().fold(0f32, |m, v| m.max(v.abs()));
            // f16 scales of tiny rows lose bits or vanish: then the error is the row itself.
            for (a, b) in x.iter().zip(&y) {
                assert!(b.is_finite() && (a - b).abs() <= max * 1.01, "{} {name}: {a} became {b}", block.name());
            }
            if name == "zeros" {
                assert!(y.iter().all(|&v| v == 0.0), "{}: zeros changed", block.name());
            }
        }
    }
}
