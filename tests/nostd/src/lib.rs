//! Links the three no_std rooms without std. See Cargo.toml.
#![no_std]
#![forbid(unsafe_code)]

use forerun_engine::config::Config;
use forerun_format::gguf::Header;
use forerun_kernels::KernelSet;

#[global_allocator]
static HEAP: linked_list_allocator::LockedHeap = linked_list_allocator::LockedHeap::empty();

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// Uses each room, so that none is left out.
pub fn proof(bytes: &[u8]) -> bool {
    let header = Header::parse(bytes, bytes.len() as u64);
    header.and_then(|h| Config::read(&h)).is_ok() && KernelSet::select(None).is_some()
}
