//! A run leaves nothing of the model file in the page cache, which would be charged to it: header, resident weights,
//! experts and embedding rows.
//!
//! Relies on a file system with O_DIRECT below the target folder.

mod common;

use common::{Scratch, finish, forerun, tests, tiny_dense, tiny_moe};
use forerun_linux::{DirectFile, sys};
use std::fs::File;

/// What a run may leave: the kernel keeps a piece that was read ahead beside the header's end.
const LEFT_BYTES_MAX: usize = 64 << 10;

#[test]
fn a_run_leaves_no_page_of_the_model_cached() {
    let s = Scratch::new("page-cache");
    let picture = tests("demo/scene_083.png");
    for model in [tiny_moe(), tiny_dense()] {
        let path = s.path("model.gguf");
        std::fs::copy(model, &path).expect("copy");
        let file = File::open(&path).expect("open");
        file.sync_all().expect("sync");
        sys::drop_page_cache(&file);
        let cached = || sys::cached_bytes(&file).expect("mincore");
        if cached() > 0 || !DirectFile::open(&path).expect("open").is_direct() {
            return println!("skipped: no O_DIRECT on the file system of {}", path.display());
        }
        for io in ["auto", "pread"] {
            let before = cached();
            let mut c = forerun();
            c.args(["run", "--json", "--temperature", "0", "--slots", "8", "--max-tokens", "8", "--io", io]);
            c.args(["--prompt", "Is the door open?", "--image"]).arg(&picture).arg("--model").arg(&path);
            let o = finish(&mut c);
            assert!(o.json()["completion_tokens"].as_u64() > Some(1), "{o:?}");
            let grown = cached().saturating_sub(before);
            println!("{io}: {grown} bytes more in the page cache");
            assert!(grown <= LEFT_BYTES_MAX, "{io}: {grown} bytes of the model stayed in the page cache");
        }
        // What is read in the usual way is seen by this count.
        let bytes = std::fs::read(&path).expect("read").len();
        assert!(cached() >= bytes, "{} of {bytes} bytes read are cached", cached());
    }
}
