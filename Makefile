# make demo: builds forerun and lets the bundled model look at bundled pictures.
# make test: all tests. make lint: format and clippy. make build: static release binaries in target/bin.
# make board: the same for aarch64 boards, in target/board. make test-arm: those, and tests of the Arm kernels, under qemu.

HOST := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
RUSTFLAGS_HOST = CARGO_TARGET_$(shell echo $(HOST) | tr 'a-z-' 'A-Z_')_RUSTFLAGS
OUT = target/$(HOST)/release

.PHONY: demo build static board test test-arm lint clean deps deps-lint deps-board deps-arm

# Each recipe that needs the toolchain runs make again after deps, so that HOST is that of a rustc just installed.
demo: build
	target/bin/forerun demo

build: deps
	@$(MAKE) --no-print-directory static

# Static: --target keeps the flag away from procedural macros, which must be dynamic.
static:
	$(RUSTFLAGS_HOST)="-C target-feature=+crt-static" cargo build --release --locked --target $(HOST) --bin forerun --bin forerun-quant
	@mkdir -p target/bin
	@cp $(OUT)/forerun $(OUT)/forerun-quant target/bin/
	@ls -l target/bin

test: deps
	cargo build --locked --manifest-path tests/nostd/Cargo.toml --target-dir target/nostd
	cargo test --workspace --locked
	@$(MAKE) --no-print-directory static
	tests/release.sh target/bin

board: deps deps-board
	tests/board.sh build

test-arm: deps deps-arm
	tests/board.sh test

lint: deps deps-lint
	cargo fmt --all --check
	cargo fmt --manifest-path tests/nostd/Cargo.toml --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	tests/tidy.sh

deps:
	@tests/deps.sh build

deps-lint:
	@tests/deps.sh lint

deps-board:
	@tests/deps.sh board

deps-arm:
	@tests/deps.sh arm

clean:
	cargo clean
