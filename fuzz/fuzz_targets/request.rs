#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    ironhorse_serve::exercise::request(bytes);
});
