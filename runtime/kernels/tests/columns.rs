//! Each element of a product has the bits that its row and column alone give, whatever is multiplied beside them. On this
//! rest equal answers for every chunk size and number of threads.

mod common;

use common::{Fill, Matrix, Rng, TYPES};
use forerun_format::BlockType;
use forerun_kernels::KernelSet;

/// Below, at, and above whole tiles of 2, 4, 8, 16 and 32 columns.
const COLUMNS: [usize; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40];

/// Lengths of columns, and how many rows and columns of them are multiplied together. Lengths are parts of a block, one,
/// several, and some with a rest; for weights without blocks also parts of a vector. Odd numbers of rows, as the last of
/// several threads may get; of long ones few, for time.
const SHAPES: [(&[usize], &[usize], &[usize]); 4] = [
    (&[7, 33, 32, 96, 256, 288, 768], &[1, 2, 3, 7, 17], &COLUMNS),
    (&[2048, 4320], &[3], &COLUMNS),
    // More than what a kernel keeps in a cache: columns, rows.
    (&[4352], &[2], &[147]),
    (&[17408], &[2], &[40]),
];

fn products(set: &KernelSet, block: BlockType, n: usize, row_counts: &[usize], column_counts: &[usize]) {
    let (rows, columns) = (row_counts[row_counts.len() - 1], column_counts[column_counts.len() - 1]);
    let mut rng = Rng::new(n);
    let m = Matrix::new(block, rows, n, Fill::Uniform(1.0), &mut rng);
    let x = rng.vec(columns * n, 3.0);
    let one = |i: usize| m.product(set, (i / columns, 1), &x[i % columns * n..][..n])[0];
    let alone: Vec<f32> = (0..rows * columns).map(one).collect();
    assert!(alone.iter().all(|y| y.is_finite()));
    // A few integer sums of short columns are zero by chance.
    assert!(alone.iter().filter(|y| **y == 0.0).count() * 8 < alone.len(), "{} {n}: zeros", block.name());
    for &count in row_counts {
        for &wide in column_counts {
            // The last ones, so that a column's place is another one each time.
            let (row, column) = (rows - count, columns - wide);
            let got = m.product(set, (row, count), &x[column * n..]);
            for (i, got) in got.iter().enumerate() {
                let (r, c) = (i / wide, i % wide);
                let want = alone[(row + r) * columns + column + c];
                assert!(
                    got.to_bits() == want.to_bits(),
                    "{} {} ({count}, {n}) x {wide}: row {r}, column {c} is {got:e}, alone {want:e}",
                    set.name,
                    block.name()
                );
            }
        }
    }
}

#[test]
fn an_element_has_the_same_bits_whatever_is_beside_it() {
    for set in KernelSet::available() {
        for &block in TYPES {
            let mut lengths = 0;
            for (all, rows, columns) in SHAPES {
                for &n in all.iter().filter(|n| n.is_multiple_of(block.block_elems())) {
                    products(set, block, n, rows, columns);
                    lengths += 1;
                }
            }
            assert!(lengths >= 5, "{}: {lengths} lengths", block.name());
        }
    }
}

#[test]
fn a_query_has_the_same_bits_whatever_is_beside_it() {
    for set in KernelSet::available() {
        for (dim, stride, positions) in [(24, 24, 1), (72, 144, 65), (20, 23, 7)] {
            let rows = COLUMNS[COLUMNS.len() - 1];
            let mut rng = Rng::new(dim);
            let q = rng.vec((rows - 1) * stride + dim, 1.0);
            let (k, v) = (rng.vec(positions * dim, 2.0), rng.vec(positions * dim, 1.0));
            let run = |q: &[f32]| {
                let mut out = vec![0f32; q.len()];
                (set.attention_rows)(q, &k, &v, dim, stride, 0.5, &mut out);
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let alone: Vec<Vec<u32>> = (0..rows).map(|r| run(&q[r * stride..][..dim])).collect();
            for count in COLUMNS {
                let first = rows - count;
                for (r, got) in run(&q[first * stride..]).chunks(stride).enumerate() {
                    assert!(got[..dim] == alone[first + r], "{} {dim}: query {r} of {count}", set.name);
                }
            }
        }
    }
}
