//! Finite differences.
/// x
pub struct GradMismatch;
/// x
pub struct OpGradients;
/// x
pub struct ProgramGradients;
/// x
pub fn check_op_gradients() {}
/// x
pub fn check_program_gradients() {}
