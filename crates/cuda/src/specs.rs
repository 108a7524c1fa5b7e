//! Every specialisation of every kernel file in use, collected from the launchers.

use crate::kernels::Spec;

/// What `cargo xtask kernels` compiles for all architectures.
pub fn check_specs() -> Vec<Spec> {
    [crate::op::specs(), crate::eager::specs(), vec![crate::measure::spec()]].concat()
}
