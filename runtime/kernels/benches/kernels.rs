//! `cargo bench -p forerun-kernels`: every kernel of the best variant (or of `FORERUN_KERNELS`), one thread. After each
//! product it prints GB/s of weights and the share of what this core reads from memory in the same run.

use bytemuck::Zeroable;
use criterion::{BenchmarkId, Criterion, Throughput};
use forerun_format::BlockType;
use forerun_kernels::{ActQ8, Columns, KernelSet, KvRows, act_blocks, act_columns, quantize_row};
use std::cell::Cell;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Weights of a matrix: far more than the caches hold.
const ELEMENTS: usize = 1 << 27;
/// Elements in a row, as in the 35B model.
const N: usize = 2048;

fn noise(n: usize) -> Vec<f32> {
    let mut s = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Bytes per second that this core reads: the median of five products of an f32 matrix, far larger than the caches, which the
/// kernels compute faster than memory delivers.
fn read_bytes_per_s(set: &KernelSet) -> f64 {
    let (matrix, x) = (vec![1f32; 1 << 26], vec![1f32; N]);
    let mut out = vec![0f32; matrix.len() / N];
    let mut passes = [0f64; 5];
    for pass in &mut passes {
        let start = Instant::now();
        let columns = Columns { f32: &x, q8: &[], n: N };
        (set.matmul)(BlockType::F32, bytemuck::cast_slice(&matrix), columns, &mut out);
        *pass = size_of_val(&*matrix) as f64 / start.elapsed().as_secs_f64();
    }
    black_box(&out);
    passes.sort_unstable_by(f64::total_cmp);
    passes[2]
}

/// Measures `f` and returns the mean seconds of one call.
fn timed(c: &mut Criterion, group: &str, name: &str, throughput: Throughput, f: impl Fn()) -> f64 {
    let (time, calls) = (Cell::new(Duration::ZERO), Cell::new(0u64));
    let mut g = c.benchmark_group(group);
    g.throughput(throughput).sample_size(10).measurement_time(Duration::from_secs(2));
    g.bench_function(BenchmarkId::from_parameter(name), |b| {
        b.iter_custom(|n| {
            let start = Instant::now();
            (0..n).for_each(|_| f());
            let took = start.elapsed();
            time.set(time.get() + took);
            calls.set(calls.get() + n);
            took
        });
    });
    g.finish();
    time.get().as_secs_f64() / calls.get().max(1) as f64
}

fn columns(set: &KernelSet, n: usize, count: usize) -> (Vec<f32>, Vec<ActQ8>) {
    let x = noise(n * count);
    let mut q8 = vec![ActQ8::zeroed(); act_blocks(n) * act_columns(count)];
    (set.quantize_act)(&x, n, &mut q8);
    (x, q8)
}

fn products(c: &mut Criterion, set: &KernelSet, read: f64) {
    for block in BlockType::ALL {
        let row_bytes = block.row_bytes(N as u64).unwrap_or(0) as usize;
        let rows = ELEMENTS / N / if block.block_elems() == 1 { 4 } else { 1 };
        // A few different rows over and over: values do not change the time, and quantizing takes long.
        let mut some = vec![0u8; 64 * row_bytes];
        for (row, x) in some.chunks_exact_mut(row_bytes).zip(noise(64 * N).chunks_exact(N)) {
            quantize_row(block, x, row);
        }
        let mut space = vec![0u32; rows * row_bytes / 4];
        let w: &mut [u8] = bytemuck::cast_slice_mut(&mut space);
        w.chunks_mut(some.len()).for_each(|w| w.copy_from_slice(&some[..w.len()]));
        let (x, q8) = columns(set, N, 1);
        let out = std::cell::RefCell::new(vec![0f32; rows]);
        let bytes = w.len();
        let seconds = timed(c, "matvec", block.name(), Throughput::Bytes(bytes as u64), || {
            (set.matmul)(block, w, Columns { f32: &x, q8: &q8, n: N }, &mut out.borrow_mut());
        });
        println!(
            "matvec {}: {:.2} GB/s, {:.0} % of the {:.2} GB/s read",
            block.name(),
            bytes as f64 / seconds / 1e9,
            bytes as f64 / seconds / read * 100.0,
            read / 1e9
        );
        // 512 rows, an expert's gate: what prefill and the vision tower do, in cache.
        for count in [2, 16, 64] {
            let (x, q8) = columns(set, N, count);
            let w = &w[..512 * row_bytes];
            let out = std::cell::RefCell::new(vec![0f32; 512 * count]);
            let macs = (512 * N * count) as u64;
            let seconds = timed(c, &format!("matmul{count}"), block.name(), Throughput::Elements(macs), || {
                (set.matmul)(block, w, Columns { f32: &x, q8: &q8, n: N }, &mut out.borrow_mut());
            });
            println!("matmul {} x {count}: {:.1} GMAC/s", block.name(), macs as f64 / seconds / 1e9);
        }
    }
}

fn others(c: &mut Criterion, set: &KernelSet) {
    let elements = |n: usize| Throughput::Elements(n as u64);
    let (x, w) = (noise(N), noise(N));
    let out = std::cell::RefCell::new(noise(N));
    timed(c, "rms_norm", "2048", elements(N), || (set.rms_norm)(&mut out.borrow_mut(), &x, &w, 1e-6));
    timed(c, "layer_norm", "2048", elements(N), || (set.layer_norm)(&mut out.borrow_mut(), &x, &w, &w, 1e-6));
    timed(c, "silu_mul", "2048", elements(N), || (set.silu_mul)(&mut out.borrow_mut(), &w));
    timed(c, "gelu_tanh", "2048", elements(N), || (set.gelu_tanh)(&mut out.borrow_mut()));
    timed(c, "gelu_erf", "2048", elements(N), || (set.gelu_erf)(&mut out.borrow_mut()));
    timed(c, "axpy", "2048", elements(N), || (set.axpy)(1e-9, &x, &mut out.borrow_mut()));
    let q8 = std::cell::RefCell::new(vec![ActQ8::zeroed(); act_blocks(N)]);
    timed(c, "quantize_act", "2048", elements(N), || (set.quantize_act)(&x, N, &mut q8.borrow_mut()));
    let (state, taps, input) = (noise(3 * 8192), noise(4 * 8192), noise(8192));
    let state = std::cell::RefCell::new((state, input));
    timed(c, "conv_step", "8192", elements(8192), || {
        let (state, x) = &mut *state.borrow_mut();
        (set.conv_step)(state, &taps, x);
    });
    let (q, k, v) = (noise(128), noise(128), noise(128));
    let state = std::cell::RefCell::new((noise(128 * 128), vec![0f32; 128]));
    timed(c, "delta_step", "128x128", elements(128 * 128), || {
        let (s, out) = &mut *state.borrow_mut();
        (set.delta_step)(s, &q, &k, &v, 0.9, 0.1, out);
    });
    let (q, kv) = (noise(256), noise(256 * 1024));
    let half: Vec<u16> = kv.iter().map(|&x| half::f16::from_f32(x).to_bits()).collect();
    let out = std::cell::RefCell::new(vec![0f32; 256]);
    for (name, rows) in [("1024 f32", KvRows::F32(&kv)), ("1024 f16", KvRows::F16(&half))] {
        timed(c, "attention", name, elements(2 * kv.len()), || {
            (set.attention)(&q, rows, rows, 1024, 0.06, &mut out.borrow_mut());
        });
    }
}

/// A head of the vision tower: 1,024 patches, 72 elements in rows of 1,152.
fn tower(c: &mut Criterion, set: &KernelSet) {
    const TOKENS: usize = 1024;
    const DIM: usize = 72;
    const STRIDE: usize = 1152;
    let (q, kv) = (noise((TOKENS - 1) * STRIDE + DIM), noise(TOKENS * DIM));
    let out = std::cell::RefCell::new(q.clone());
    let macs = (2 * TOKENS * TOKENS * DIM) as u64;
    let seconds = timed(c, "attention_rows", "1024x72", Throughput::Elements(macs), || {
        (set.attention_rows)(&q, &kv, &kv, DIM, STRIDE, 0.1, &mut out.borrow_mut());
    });
    println!("attention_rows: {:.1} GMAC/s", macs as f64 / seconds / 1e9);
}

/// Of an expert of the 35B model, just read: in cache.
fn checksum(c: &mut Criterion, set: &KernelSet) {
    let bytes = vec![1u8; 1_769_472];
    let seconds = timed(c, "crc32c", "1769472", Throughput::Bytes(bytes.len() as u64), || {
        black_box((set.crc32c)(&bytes));
    });
    println!("crc32c: {:.2} GB/s", bytes.len() as f64 / seconds / 1e9);
}

fn main() {
    let forced = std::env::var("FORERUN_KERNELS").ok();
    let Some(set) = KernelSet::select(forced.as_deref()) else {
        eprintln!("FORERUN_KERNELS={}: not in this build or not for this CPU", forced.unwrap_or_default());
        std::process::exit(2);
    };
    let read = read_bytes_per_s(set);
    println!("kernels {}; one core reads {:.2} GB/s", set.name, read / 1e9);
    let mut c = Criterion::default().configure_from_args().without_plots();
    products(&mut c, set, read);
    others(&mut c, set);
    tower(&mut c, set);
    checksum(&mut c, set);
    c.final_summary();
}
