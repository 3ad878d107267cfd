//! One product many times, for `tests/arm_cycles.py`: `product VARIANT TYPE ROWS N COLUMNS REPEATS`.

use bytemuck::Zeroable;
use forerun_format::BlockType;
use forerun_kernels::{ActQ8, Columns, KernelSet, act_blocks, act_columns, quantize_row};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [variant, block, numbers @ ..] = args.as_slice() else { panic!("product VARIANT TYPE ROWS N COLUMNS REPEATS") };
    let numbers: Vec<usize> = numbers.iter().map(|n| n.parse().expect("a number")).collect();
    let [rows, n, columns, repeats] = numbers[..] else { panic!("four numbers") };
    let set = KernelSet::select(Some(variant)).expect("a variant of this CPU");
    let block = BlockType::ALL.into_iter().find(|b| b.name() == block).expect("a block type");

    let x: Vec<f32> = (0..columns * n).map(|i| (i * 7 % 31) as f32 - 15.0).collect();
    let mut q8 = vec![ActQ8::zeroed(); act_columns(columns) * act_blocks(n)];
    (set.quantize_act)(&x, n, &mut q8);
    let row_bytes = block.row_bytes(n as u64).expect("whole blocks") as usize;
    let mut space = vec![0u32; (rows * row_bytes).div_ceil(4)];
    let w = &mut bytemuck::cast_slice_mut(&mut space)[..rows * row_bytes];
    w.chunks_exact_mut(row_bytes).for_each(|row| quantize_row(block, &x[..n], row));
    let mut out = vec![0f32; rows * columns];
    for _ in 0..repeats {
        (set.matmul)(block, w, Columns { f32: &x, q8: &q8, n }, &mut out);
    }
    println!("{}", out.iter().sum::<f32>());
}
