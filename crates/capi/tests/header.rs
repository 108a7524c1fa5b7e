//! `include/ironhorse.h` is what cbindgen makes of the sources.
//!
//! IRONHORSE_BLESS=1 cargo test -p ironhorse-capi --test header    writes it anew

use std::path::Path;

/// In the order of the header.
const SOURCES: [&str; 6] = ["border", "elementwise", "rows", "model", "training", "sampling"];

#[test]
fn header_is_fresh() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(root.join("src").join(source).with_extension("rs"));
    }
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    let (made, path) = (String::from_utf8(made).unwrap(), root.join("include/ironhorse.h"));
    if std::env::var_os("IRONHORSE_BLESS").is_some_and(|bless| bless == "1") {
        std::fs::write(&path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == made,
        "ironhorse.h is stale: IRONHORSE_BLESS=1 cargo test -p ironhorse-capi --test header"
    );
}
