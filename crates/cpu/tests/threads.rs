//! Every conformance case gives the same bits with 1, 2 and 5 threads, on every instruction set of this machine, and with operands that
//! are rounded to bf16.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use ironhorse_core::op::{Accum, LayerNormBwd};
use ironhorse_core::{
    Builder, DType, Engine, EngineExt, Layout, Operands, Precision, Program, Scalars, Slot,
};
use ironhorse_cpu::isa::Isa;
use ironhorse_cpu::{CpuEngine, CpuSettings};
use ironhorse_testkit::{Case, Rng, cases_in};

/// The FNV-1a hash of the slots that the op writes.
fn digest(engine: &mut CpuEngine, case: &Case) -> u64 {
    case.load(engine).unwrap();
    engine.run(&case.program, 0..1, &case.scalars).unwrap();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for slot in case.op().writes() {
        let mut bytes = vec![0; slot.bytes()];
        engine.read_bytes(slot, &mut bytes).unwrap();
        bytes.iter().for_each(|&byte| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    }
    hash
}

/// Prints, with `DIGESTS=1` and `--nocapture`, the digest of each case, large ones included: to compare the bits of two
/// commits.
#[test]
fn the_number_of_threads_changes_no_bit() {
    let print = std::env::var_os("DIGESTS").is_some();
    let mut cases = cases_in(Precision::F32, |_| true);
    cases.retain(|case| print || !case.large);
    let layout = cases.iter().fold(Layout::default(), |all, case| all.union(&case.reserve));
    for (isa, operands) in
        Isa::supported().map(|isa| (isa, Operands::F32)).chain([(Isa::detect(), Operands::Bf16)])
    {
        let mut engines = [1, 2, 5].map(|threads| match operands {
            Operands::F32 => CpuEngine::with_isa(threads, isa),
            operands => CpuEngine::with(CpuSettings { threads, operands }),
        });
        engines.iter_mut().for_each(|engine| engine.reserve(&layout).unwrap());
        for (index, case) in cases.iter().enumerate() {
            let [one, two, five] = engines.each_mut().map(|engine| digest(engine, case));
            let name = format!("{} ({}) on {}, {operands:?}", case.op().name(), case.name, isa.name());
            assert!(one == two && one == five, "{name}");
            if print && operands == Operands::F32 {
                println!("DIGEST {} {index} {} ({}) {one:016x}", isa.name(), case.op().name(), case.name);
            }
        }
    }
}

/// The backward of a layer norm, what it reads, and what it writes.
fn layernorm_bwd([rows, width]: [usize; 2]) -> (Program, [Slot; 5], [Slot; 3]) {
    let mut builder = Builder::new();
    let [inp, d_out, d_inp] =
        ["inp", "d_out", "d_inp"].map(|name| builder.io(name, [rows, width], DType::F32));
    let [weight, d_weight, d_bias] =
        ["weight", "d_weight", "d_bias"].map(|name| builder.io(name, [width], DType::F32));
    let [mean, rstd] = ["mean", "rstd"].map(|name| builder.io(name, [rows], DType::F32));
    let (accum_inp, accum) = (Accum::Write, Accum::Write);
    builder
        .push(LayerNormBwd { d_inp, d_weight, d_bias, d_out, inp, mean, rstd, weight, accum_inp, accum })
        .unwrap();
    (builder.finish().unwrap(), [inp, d_out, weight, mean, rstd], [d_inp, d_weight, d_bias])
}

/// Blocks of rows of all sizes, whole and not.
#[test]
fn the_number_of_threads_changes_no_bit_of_sums_over_many_rows() {
    for size in [[7, 768], [100, 768], [610, 768], [1000, 256], [2100, 512], [130, 1600]] {
        let (program, given, results) = layernorm_bwd(size);
        let [one, two, five] = [1, 2, 5].map(|threads| {
            let mut engine = CpuEngine::new(threads);
            engine.reserve(program.layout()).unwrap();
            let mut rng = Rng::new(5);
            for slot in given {
                engine.write_f32(slot, &rng.uniforms(slot.numel(), -1.0, 1.0)).unwrap();
            }
            engine.run(&program, 0..1, &Scalars::default()).unwrap();
            results.map(|slot| {
                let mut bytes = vec![0; slot.bytes()];
                engine.read_bytes(slot, &mut bytes).unwrap();
                bytes
            })
        });
        assert!(one == two && one == five, "{size:?}");
    }
}
