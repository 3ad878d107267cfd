//! Cases of transformers' own tests for this model (the first seven), further ones computed with its code, and noise.

use super::*;
use alloc::vec;

const TOKENS: TokenIds = TokenIds {
    image: 100,
    video: 101,
    image_start: 10,
    image_end: 11,
    slice_start: 12,
    slice_end: 13,
    newline: 14,
    stop: Vec::new(),
};

fn run(ids: &[u32], grids: &[(u32, u32)], merge: u32) -> Result<Positions, PositionError> {
    positions(ids, &token_types(ids, &TOKENS), grids, merge, &TOKENS, true)
}

#[track_caller]
fn check(ids: &[u32], grids: &[(u32, u32)], t: &[u32], h: &[u32], w: &[u32], delta: i64) {
    let p = run(ids, grids, 4).unwrap();
    assert_eq!((&p.t[..], &p.h[..], &p.w[..], p.delta), (t, h, w, delta));
}

const T: [u32; 4] = [100; 4];
const V: [u32; 4] = [101; 4];

#[test]
fn one_picture() {
    let ids = [&[1, 10][..], &T, &[11, 2]].concat();
    check(&ids, &[(8, 8)], &[0, 1, 1, 1, 1, 1, 1, 4], &[0, 0, 1, 1, 2, 2, 3, 4], &[0, 0, 1, 2, 1, 2, 3, 4], -3);
}

#[test]
fn a_newline_after_the_picture_belongs_to_it() {
    let ids = [&[1, 10][..], &T, &[11, 14, 2]].concat();
    check(
        &ids,
        &[(8, 8)],
        &[0, 1, 1, 1, 1, 1, 1, 1, 4],
        &[0, 0, 1, 1, 2, 2, 3, 1, 4],
        &[0, 0, 1, 2, 1, 2, 3, 1, 4],
        -4,
    );
}

#[test]
fn a_double_newline_is_text() {
    let ids = [&[1, 10][..], &T, &[11, 271, 2]].concat();
    check(
        &ids,
        &[(8, 8)],
        &[0, 1, 1, 1, 1, 1, 1, 4, 5],
        &[0, 0, 1, 1, 2, 2, 3, 4, 5],
        &[0, 0, 1, 2, 1, 2, 3, 4, 5],
        -3,
    );
}

#[test]
fn two_rows_of_slices() {
    let ids = [&[1, 10][..], &T, &[11, 12, 100, 13, 12, 100, 13, 14, 12, 100, 13, 12, 100, 13, 2]].concat();
    let mut t = vec![1; 21];
    (t[0], t[20]) = (0, 4);
    check(
        &ids,
        &[(8, 8), (4, 4), (4, 4), (4, 4), (4, 4)],
        &t,
        &[0, 0, 1, 1, 2, 2, 3, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 4],
        &[0, 0, 1, 2, 1, 2, 3, 1, 1, 1, 2, 2, 2, 3, 1, 1, 1, 2, 2, 2, 4],
        -16,
    );
}

#[test]
fn two_pictures_with_text_between() {
    let ids = [&[1, 10][..], &T, &[11, 2, 10], &T, &[11, 3]].concat();
    check(
        &ids,
        &[(8, 8), (8, 8)],
        &[0, 1, 1, 1, 1, 1, 1, 4, 5, 5, 5, 5, 5, 5, 8],
        &[0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8],
        &[0, 0, 1, 2, 1, 2, 3, 4, 4, 5, 6, 5, 6, 7, 8],
        -6,
    );
}

#[test]
fn two_video_frames() {
    let ids = [&[1, 10][..], &V, &[11, 10], &V, &[11, 2]].concat();
    check(
        &ids,
        &[(8, 8), (8, 8)],
        &[0, 1, 1, 1, 1, 1, 1, 4, 4, 4, 4, 4, 4, 7],
        &[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7],
        &[0, 0, 1, 2, 1, 2, 3, 3, 4, 5, 4, 5, 6, 7],
        -6,
    );
}

#[test]
fn a_single_slice() {
    let ids = [&[1, 10][..], &T, &[11, 12, 100, 13, 2]].concat();
    let h = [0, 0, 1, 1, 1, 1, 2, 1, 1, 1, 3];
    check(&ids, &[(8, 8), (4, 4)], &[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3], &h, &h, -7);
}

#[test]
fn two_pictures_with_newlines_between() {
    let ids = [&[1, 10][..], &T, &[11, 14, 10], &T, &[11, 14, 2]].concat();
    check(
        &ids,
        &[(8, 8), (8, 8)],
        &[0, 1, 1, 1, 1, 1, 1, 1, 4, 4, 4, 4, 4, 4, 4, 7],
        &[0, 0, 1, 1, 2, 2, 3, 1, 3, 4, 4, 5, 5, 6, 4, 7],
        &[0, 0, 1, 2, 1, 2, 3, 1, 3, 4, 5, 4, 5, 6, 4, 7],
        -8,
    );
}

#[test]
fn a_picture_at_the_start_has_no_halo() {
    let ids = [&[10][..], &T, &[11, 2]].concat();
    check(&ids, &[(8, 8)], &[0, 0, 0, 0, 0, 0, 3], &[0, 0, 0, 1, 1, 2, 3], &[0, 0, 1, 0, 1, 2, 3], -3);
}

/// `<image>` with `tokens` placeholders, and `rows` x `cols` slices of `each` placeholders, rows joined by a newline.
fn sliced(before: &[u32], tokens: usize, rows: usize, cols: usize, each: usize, after: &[u32]) -> Vec<u32> {
    let slice = [&[12][..], &vec![100; each], &[13]].concat();
    let slices = vec![slice.repeat(cols); rows].join(&14);
    [before, &[10], &vec![100; tokens], &[11], &slices, after].concat()
}

#[test]
fn the_thumbnail_is_spread_over_the_canvas() {
    let ids = sliced(&[1, 2], 6, 2, 2, 4, &[14, 3, 4]);
    let p = run(&ids, &[(8, 12), (8, 8), (8, 8), (8, 8), (8, 8)], 4).unwrap();
    let at = |i: usize| (p.t[i], p.h[i], p.w[i]);
    assert_eq!(at(2), (2, 1, 1), "<image>");
    assert_eq!(p.h[3..9], [2, 2, 2, 5, 5, 5], "thumbnail rows");
    assert_eq!(p.w[3..9], [2, 4, 5, 2, 4, 5], "thumbnail columns");
    assert_eq!(at(9), (2, 6, 6), "</image>");
    assert_eq!((at(10), at(11), at(14), at(15)), ((2, 2, 2), (2, 2, 2), (2, 3, 3), (2, 3, 3)), "slice 0");
    assert_eq!((at(16), at(17)), ((2, 2, 4), (2, 2, 4)), "slice 1");
    assert_eq!(at(22), (2, 3, 6), "newline between rows");
    assert_eq!((at(23), at(24)), ((2, 4, 2), (2, 4, 2)), "slice 2");
    assert_eq!((at(33), at(34)), ((2, 5, 5), (2, 5, 5)), "slice 3");
    assert_eq!(at(35), (2, 2, 2), "newline after the last row");
    assert_eq!((at(36), at(37)), ((7, 7, 7), (8, 8, 8)), "text");
    assert_eq!(p.delta, -29);
}

/// 1920x1080 in 16x mode with up to 9 slices of 448 x 448.
#[test]
fn a_full_hd_frame() {
    let ids = sliced(&[1, 2, 3], 66, 2, 4, 64, &[14, 4, 5, 6]);
    let mut grids = vec![(32, 32); 9];
    grids[0] = (24, 44);
    let p = run(&ids, &grids, 4).unwrap();
    let at = |i: usize| (p.t[i], p.h[i], p.w[i]);
    let rows: Vec<u32> = (0..6).map(|r| p.h[4 + 11 * r] - 3).collect();
    let cols: Vec<u32> = (0..11).map(|c| p.w[4 + c] - 3).collect();
    assert_eq!(rows, [0, 3, 6, 9, 12, 15]);
    assert_eq!(cols, [0, 3, 6, 9, 12, 16, 19, 22, 25, 28, 31]);
    let slice = |k: usize| 71 + 66 * k + k / 4; // index of <slice>
    assert_eq!(at(70), (3, 19, 35), "</image>");
    assert_eq!(at(slice(0) + 65), (3, 10, 10), "first </slice>");
    assert_eq!(at(slice(1)), (3, 3, 11), "second <slice>");
    assert_eq!(at(slice(4) - 1), (3, 10, 35), "newline between rows");
    assert_eq!(at(slice(7) + 65), (3, 18, 34), "last </slice>");
    assert_eq!(at(slice(7) + 66), (3, 3, 3), "newline after the block");
    assert_eq!(at(slice(7) + 67), (36, 36, 36), "text");
    assert_eq!((ids.len(), p.delta), (604, -565));
}

/// Where f32 rounding differs from exact fractions, by (canvas, thumbnail); torch.linspace(0, C - 1, n).round().
#[test]
fn spread_follows_f32() {
    for (extent, steps) in [(48, 23), (54, 27), (62, 27), (118, 15)] {
        let exact = |i: u32| {
            let (a, b) = (i * (extent - 1), steps - 1); // a / b to even
            let (q, r) = (a / b, 2 * (a % b));
            q + u32::from(r > b || (r == b && q % 2 == 1))
        };
        assert!((0..steps).any(|i| spread(extent, steps, i) != exact(i)), "({extent}, {steps})");
    }
    assert_eq!(spread(9, 1, 0), 0);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let ids = [&[1, 10][..], &T, &[11, 2]].concat();
    assert_eq!(run(&ids, &[(8, 12)], 4), Err(PositionError::Tokens { crop: 0, found: 4, expected: 6 }));
    assert_eq!(run(&ids, &[(8, 8)], 2), Err(PositionError::Tokens { crop: 0, found: 4, expected: 16 }));
    assert_eq!(run(&ids, &[], 4), Err(PositionError::Crops { found: 1, expected: 0 }));
    assert_eq!(run(&ids, &[(8, 8), (8, 8)], 4), Err(PositionError::Crops { found: 1, expected: 2 }));
    assert_eq!(run(&ids, &[(8, 9)], 4), Err(PositionError::Grid { crop: 0, grid: (8, 9), merge: 4 }));
    assert_eq!(run(&ids, &[(8, 0)], 4), Err(PositionError::Grid { crop: 0, grid: (8, 0), merge: 4 }));
    assert_eq!(run(&ids, &[(8, 8)], 0), Err(PositionError::Grid { crop: 0, grid: (8, 8), merge: 0 }));
    assert_eq!(run(&ids[2..], &[(8, 8)], 4), Err(PositionError::Start { crop: 0, at: 0 }));
    assert_eq!(
        positions(&ids, &[], &[(8, 8)], 4, &TOKENS, true),
        Err(PositionError::Types { ids: ids.len(), types: 0 })
    );
    let sequential = positions(&ids, &token_types(&ids, &TOKENS), &[(8, 8)], 4, &TOKENS, false).unwrap();
    assert_eq!((sequential.w[5], sequential.delta), (5, 0));
    let wrong = positions(&ids, &token_types(&ids, &TOKENS), &[(8, 12)], 4, &TOKENS, false);
    assert!(wrong.is_err(), "sequential positions skip no check");
}

#[test]
fn text_alone_is_sequential() {
    let p = run(&[1, 14, 11, 2], &[], 4).unwrap();
    assert_eq!((p.t, p.delta), (vec![0, 1, 2, 3], 0));
    assert_eq!(run(&[], &[], 4).unwrap(), Positions::default());
}

/// Noise made of markers, placeholders and text: no panic, and what is accepted has a position below `n + delta`.
#[test]
fn noise_never_panics() {
    let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let mut accepted = 0;
    for round in 0..20_000 {
        let mut ids = Vec::new();
        let mut grids = Vec::new();
        for _ in 0..next(12) {
            match next(6) {
                0 => ids.push(next(20) as u32),
                1 => ids.extend([13, 14]),
                n => {
                    // Now and then a huge grid or a missing marker.
                    let (h, w) = (1 + next(3) as u32, 1 + next(3) as u32);
                    ids.push(if n == 2 { 10 } else { 12 });
                    ids.extend(vec![100 + (n as u32 & 1); (h * w) as usize]);
                    ids.push(if n == 2 { 11 } else { 13 });
                    grids.push(if next(30) == 0 { (u32::MAX - 3, u32::MAX - 3) } else { (4 * h, 4 * w) });
                }
            }
        }
        let mut types = token_types(&ids, &TOKENS);
        if next(10) == 0 && !types.is_empty() {
            let at = next(types.len() as u64) as usize;
            types[at] = [TokenType::Text, TokenType::Image, TokenType::Video][next(3) as usize];
        }
        let tokens = if next(10) == 0 { TokenIds { newline: 100, ..TOKENS } } else { TOKENS };
        if let Ok(p) = positions(&ids, &types, &grids, 4, &tokens, true) {
            accepted += 1;
            let end = ids.len() as i64 + p.delta;
            let ok =
                [&p.t, &p.h, &p.w].into_iter().all(|s| s.len() == ids.len() && s.iter().all(|&x| i64::from(x) < end));
            assert!(ok, "round {round}: {ids:?} {grids:?}");
        }
    }
    assert!(accepted > 1_000, "only {accepted} prompts were accepted: the noise tests too little");
}
