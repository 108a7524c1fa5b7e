//! Every specialisation of every kernel file in use, collected from the launchers.

use crate::kernels::{Spec, Value};
use std::collections::BTreeSet;

/// What `cargo xtask kernels` compiles: each specialisation once, those of a file together.
pub fn check_specs() -> Vec<Spec> {
    let all = [crate::op::specs(), crate::eager::specs(), vec![crate::measure::spec()]].concat();
    all.into_iter().collect::<BTreeSet<_>>().into_iter().collect()
}

/// A constant with its value, of one file.
type ConstantValue = (&'static str, &'static str, Value);

/// A selection of these specialisations, as few as it takes for every file to be compiled with every value of each of its
/// constants, though not with every combination of them.
pub fn covering(specs: &[Spec]) -> Vec<Spec> {
    let choices = |spec: &Spec| -> Vec<ConstantValue> {
        // a file without constants is a choice too
        let named = spec.defines.iter().map(|&(name, value)| (spec.file, name, value));
        named.chain([(spec.file, "", Value::Number(0))]).collect()
    };
    let mut missing: BTreeSet<ConstantValue> = specs.iter().flat_map(choices).collect();
    let mut chosen = BTreeSet::new();
    while !missing.is_empty() {
        let gain = |spec: &&Spec| choices(spec).iter().filter(|choice| missing.contains(choice)).count();
        // of equals the first: the result does not depend on anything but the list
        let Some(best) = specs.iter().rev().max_by_key(gain) else { break };
        choices(best).iter().for_each(|choice| _ = missing.remove(choice));
        chosen.insert(best.clone());
    }
    chosen.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_of_every_constant_is_covered_by_fewer_specialisations() {
        let all = check_specs();
        let some = covering(&all);
        let values = |specs: &[Spec]| -> BTreeSet<_> {
            specs.iter().flat_map(|s| s.defines.iter().map(|define| (s.file, *define))).collect()
        };
        assert_eq!(values(&some), values(&all));
        let files = |specs: &[Spec]| specs.iter().map(|spec| spec.file).collect::<BTreeSet<_>>();
        assert_eq!(files(&some), files(&all));
        assert!(some.iter().all(|spec| all.contains(spec)) && 2 * some.len() < all.len(), "{}", some.len());
    }

    #[test]
    fn what_cannot_be_left_out_stays() {
        let spec = |a: u32, b: u32| Spec::new("x.cu").define("A", a).define("B", b);
        let all = [spec(1, 1), spec(1, 2), spec(2, 1), spec(2, 2), Spec::new("y.cu")];
        assert_eq!(covering(&all), [spec(1, 1), spec(2, 2), Spec::new("y.cu")]);
        assert!(covering(&[]).is_empty());
    }
}
