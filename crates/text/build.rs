//! Packs the rank files that the crate `tiktoken-rs` (MIT) carries: the bytes of every token in the order of the ranks,
//! each after its length, compressed. As a build dependency the crate itself does not become part of the binary.

use std::io::Write;
use std::path::PathBuf;

use flate2::Compression;
use flate2::write::DeflateEncoder;
use tiktoken_rs::CoreBPE;

type Failure = Box<dyn std::error::Error>;
type Open = fn() -> Result<CoreBPE, Failure>;

/// The vocabularies and the number of their ranks. The 50256 ranks of `r50k_base` (GPT-2) are the first of `p50k_base`,
/// which `tokenizer::named` checks against the published hashes.
const VOCABULARIES: [(&str, Open, u32); 3] = [
    ("p50k_base", || Ok(tiktoken_rs::p50k_base()?), 50281),
    ("cl100k_base", || Ok(tiktoken_rs::cl100k_base()?), 100_256),
    ("o200k_base", || Ok(tiktoken_rs::o200k_base()?), 199_998),
];

/// The rank that `p50k_base` leaves out, because its end-of-text token has this id.
const P50K_GAP: u32 = 50256;

fn main() -> Result<(), Failure> {
    println!("cargo::rerun-if-changed=build.rs");
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    for (name, open, ranks) in VOCABULARIES {
        let bpe = open()?;
        let mut raw = Vec::new();
        for rank in 0..ranks {
            if name == "p50k_base" && rank == P50K_GAP {
                raw.push(0);
                continue;
            }
            let token = bpe.decode_bytes(&[rank])?;
            raw.push(u8::try_from(token.len())?);
            raw.extend(token);
        }
        let mut packed = DeflateEncoder::new(Vec::new(), Compression::best());
        packed.write_all(&raw)?;
        std::fs::write(folder.join(format!("{name}.ranks")), packed.finish()?)?;
    }
    Ok(())
}
