//! Every op of the CPU engine against the f64 oracle, on every instruction set of this machine.

use ironhorse_core::{Engine, Operands};
use ironhorse_cpu::isa::Isa;
use ironhorse_cpu::{CpuEngine, CpuSettings};
use ironhorse_testkit::{Mode, Suite};

#[test]
fn every_op_agrees_with_the_oracle_on_every_instruction_set() {
    let engine = |isa| Box::new(CpuEngine::with_isa(2, isa)) as Box<dyn Engine>;
    let mut engines: Vec<Box<dyn Engine>> = Isa::supported().map(engine).collect();
    assert!(!engines.is_empty());
    for summary in Suite::new(Mode::F32).run_each(&mut engines) {
        summary.assert_ok();
    }
}

/// Runs with the tiles of the processor (AMX), where it has them.
#[test]
fn products_of_bf16_operands_agree_with_the_oracle() {
    let settings = CpuSettings { threads: 2, operands: Operands::Bf16 };
    let mut engine = CpuEngine::with(settings);
    Suite::new(Mode::Bf16Products).run(&mut engine, &mut |_, _| ()).assert_ok();
}
