#![no_main]

use ironhorse_text::exercise::Interrupted;
use std::sync::LazyLock;

static INTERRUPTED: LazyLock<Interrupted> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("ironhorse-fuzz-journal-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder below the temporary one");
    Interrupted::new(&folder).expect("a preparation can be made")
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    INTERRUPTED.go_on(bytes);
});
