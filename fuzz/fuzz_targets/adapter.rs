#![no_main]

#[path = "../../crates/train/tests/exercise/mod.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    exercise::adapter(bytes);
});
