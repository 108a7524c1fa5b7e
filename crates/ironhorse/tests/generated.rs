//! The files that are made of the table of ops are fresh. `cargo xtask generate` writes them.
#![allow(clippy::unwrap_used)]

use ironhorse::ops::table::ALL;
use ironhorse::ops::text;
use std::path::PathBuf;

/// Compares a file with what the table gives, or writes it if IRONHORSE_BLESS=1.
#[track_caller]
fn fresh(file: &str, made: impl Fn(&str) -> String) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
    let kept = std::fs::read_to_string(&path).unwrap().replace("\r\n", "\n");
    let made = made(&kept);
    if std::env::var_os("IRONHORSE_BLESS").is_some_and(|bless| bless == "1") {
        std::fs::write(&path, &made).unwrap();
    } else {
        assert!(kept == made, "{file} does not follow from the table of ops: run cargo xtask generate");
    }
}

/// The part of a file up to and with a line.
fn head<'a>(kept: &'a str, line: &str) -> &'a str {
    let end = kept.find(line).unwrap() + line.len();
    &kept[..end]
}

#[test]
fn c_header() {
    let tail =
        "#ifdef __cplusplus\n}  // extern \"C\"\n#endif  // __cplusplus\n\n#endif  /* IRONHORSE_H */\n";
    fresh("crates/capi/include/ironhorse.h", |kept| {
        format!("{}{}{tail}", head(kept, "/* ops */\n\n"), text::c_section(ALL))
    });
}

#[test]
fn python_stub() {
    fresh("python/ironhorse/ops/__init__.pyi", |kept| {
        format!("{}{}", head(kept, "# ops\n\n"), text::python_stub(ALL))
    });
}
