//! Every op of the CPU engine against the f64 oracle, on every instruction set of this machine.

use ironhorse_cpu::CpuEngine;
use ironhorse_cpu::isa::Isa;
use ironhorse_testkit::run_all;

#[test]
fn every_op_agrees_with_the_oracle_on_every_instruction_set() {
    for isa in Isa::supported() {
        let summary = run_all(&mut || Box::new(CpuEngine::with_isa(2, isa)));
        summary.assert_ok();
    }
}
