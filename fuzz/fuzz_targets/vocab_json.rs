#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    ironhorse_text::exercise::vocab_json(bytes);
});
