use super::calls::{binary, swiglu_bwd, unary, unary_bwd};
use super::*;
use ironhorse_core::eager::{BinaryFn, UnaryFn};
use ironhorse_core::op::Act;

fn ops() -> impl Iterator<Item = UnaryFn> {
    let others = [UnaryFn::Silu, UnaryFn::GeluErf, UnaryFn::Square, UnaryFn::Scale(-0.75)];
    Act::ALL.iter().copied().map(UnaryFn::Act).chain(others)
}

fn reference(op: UnaryFn, x: f64) -> f64 {
    match op {
        UnaryFn::Silu => x / (1.0 + (-x).exp()),
        UnaryFn::Act(act) => ironhorse_testkit::activation(act, x),
        UnaryFn::GeluErf => 0.5 * x * (1.0 + libm::erf(x / 2f64.sqrt())),
        UnaryFn::Square => x * x,
        UnaryFn::Scale(a) => a * x,
    }
}

fn unary_case<'a>(x: Vec<f64>, call: &'a dyn Fn(&[Array], &[Array]) -> Done) -> Case<'a> {
    let n = x.len();
    Case { inputs: elements(&[x]), outputs: vec![(Elements, n)], call }
}

#[test]
fn unary_forward_and_backward() {
    for op in ops() {
        for n in [0, 1, 31, 33, 1027] {
            let (x, d) = (random(n, 1), random(n, 2));
            // SAFETY: `run` passes arrays of its own, as long as the case says.
            let forward = |from: &[Array], to: &[Array]| unsafe { unary(op, from[0], to[0], n) };
            let got = run(&unary_case(x.clone(), &forward), Float::F64, &[]);
            let want: Vec<f64> = x.iter().map(|&x| reference(op, x)).collect();
            close(&got[0], &want, 1e-12, "unary");

            // SAFETY: `run` passes arrays of its own, as long as the case says.
            let call = |from: &[Array], to: &[Array]| unsafe { unary_bwd(op, [from[0], from[1]], to[0], n) };
            let case =
                Case { inputs: elements(&[d.clone(), x.clone()]), outputs: vec![(Elements, n)], call: &call };
            // A difference across a kink, squared ReLU's at 0, is off by a quarter of the step: hence its length.
            let slope = |i: usize| (reference(op, x[i] + 1e-6) - reference(op, x[i] - 1e-6)) / 2e-6 * d[i];
            close(&run(&case, Float::F64, &[])[0], &(0..n).map(slope).collect::<Vec<_>>(), 1e-6, "unary_bwd");
            types_agree(&case, "unary_bwd");
            let far: Vec<f64> = rounded(&x.iter().map(|x| x * 8.0).collect::<Vec<_>>());
            // A forward output is always wanted.
            for x in [x, far] {
                let case = unary_case(x, &forward);
                let want = run(&case, Float::F64, &[]);
                for (float, unit) in
                    [(Float::F32, 1e-6), (Float::BF16, 2.1 * 2f64.powi(-9)), (Float::F16, 2f64.powi(-11))]
                {
                    close(&run(&case, float, &[])[0], &want[0], unit, "unary types");
                }
            }
        }
    }
}

#[test]
fn gelu_erf_is_accurate_in_its_tail() {
    let x: Vec<f64> = (0..4000).map(|i| f64::from((-10.0 + 0.005 * f64::from(i)) as f32)).collect();
    // SAFETY: `run` passes arrays of its own, as long as the case says.
    let forward = |from: &[Array], to: &[Array]| unsafe { unary(UnaryFn::GeluErf, from[0], to[0], 4000) };
    let case = unary_case(x.clone(), &forward);
    for (i, got) in run(&case, Float::F32, &[])[0].iter().enumerate() {
        let want = 0.5 * x[i] * libm::erfc(-x[i] / 2f64.sqrt());
        assert!((got - want).abs() <= 1.5e-6 * want.abs() + 1e-37, "gelu({}) = {got}, exactly {want}", x[i]);
    }
}

#[test]
fn special_values_are_those_of_pytorch() {
    let x = vec![f64::NAN, f64::INFINITY, 1e30, -1e30, 0.0];
    for op in ops() {
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let forward = |from: &[Array], to: &[Array]| unsafe { unary(op, from[0], to[0], 5) };
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let backward = |from: &[Array], to: &[Array]| unsafe { unary_bwd(op, [from[0], from[1]], to[0], 5) };
        for float in [Float::F64, Float::F32, Float::BF16] {
            let y = &run(&unary_case(x.clone(), &forward), float, &[])[0];
            assert!(y[0].is_nan() && y[4] == 0.0, "{op:?} {float:?} {y:?}");
            let case = Case {
                inputs: elements(&[vec![1.0; 5], x.clone()]),
                outputs: vec![(Elements, 5)],
                call: &backward,
            };
            let d = &run(&case, float, &[])[0];
            if matches!(op, UnaryFn::Silu | UnaryFn::Act(Act::Gelu) | UnaryFn::GeluErf) {
                assert!(
                    y[1] == f64::INFINITY && (y[2] / 1e30 - 1.0).abs() < 0.01 && y[3] == 0.0,
                    "{op:?} {y:?}"
                );
                assert!(
                    d[0].is_nan() && d[2..4] == [1.0, 0.0] && (d[4] - 0.5).abs() < 1e-6,
                    "{op:?} {float:?} {d:?}"
                );
            }
        }
    }
}

fn both(op: BinaryFn, [a, b]: [f64; 2]) -> f64 {
    match op {
        BinaryFn::Add => a + b,
        BinaryFn::Mul => a * b,
        BinaryFn::Swiglu => a / (1.0 + (-a).exp()) * b,
    }
}

#[test]
fn binary_forward_and_swiglu_backward() {
    for n in [0, 1, 31, 33, 1027] {
        let (a, b, d) = (random(n, 3), random(n, 4), random(n, 5));
        for op in [BinaryFn::Add, BinaryFn::Mul, BinaryFn::Swiglu] {
            // SAFETY: `run` passes arrays of its own, as long as the case says.
            let call = |from: &[Array], to: &[Array]| unsafe { binary(op, [from[0], from[1]], to[0], n) };
            let case =
                Case { inputs: elements(&[a.clone(), b.clone()]), outputs: vec![(Elements, n)], call: &call };
            let want: Vec<f64> = a.iter().zip(&b).map(|(&a, &b)| both(op, [a, b])).collect();
            for (float, unit) in [
                (Float::F64, 1e-14),
                (Float::F32, 1e-6),
                (Float::BF16, 2.1 * 2f64.powi(-9)),
                (Float::F16, 2f64.powi(-11)),
            ] {
                close(&run(&case, float, &[])[0], &want, unit, "binary");
            }
        }
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call = |from: &[Array], to: &[Array]| unsafe {
            swiglu_bwd([from[0], from[1], from[2]], [to[0], to[1]], n)
        };
        let inputs = elements(&[d.clone(), a.clone(), b.clone()]);
        let case = Case { inputs, outputs: vec![(Elements, n); 2], call: &call };
        let got = run(&case, Float::F64, &[]);
        let f = |x: [f64; 2]| both(BinaryFn::Swiglu, x);
        for i in 0..n {
            let d_gate = (f([a[i] + 1e-5, b[i]]) - f([a[i] - 1e-5, b[i]])) / 2e-5 * d[i];
            let d_up = f([a[i], 1.0]) * d[i];
            close(&[got[0][i], got[1][i]], &[d_gate, d_up], 1e-6, "swiglu_bwd");
        }
        types_agree(&case, "swiglu_bwd");
    }
}

#[test]
fn in_place() {
    let n = 1027;
    for float in Float::ALL {
        for op in ops() {
            let x = Memory::new(float, &random(n, 1));
            // SAFETY: `run` passes arrays of its own, as long as the case says.
            let call = |from: &[Array], to: &[Array]| unsafe { unary(op, from[0], to[0], n) };
            let want = run(&unary_case(random(n, 1), &call), float, &[]);
            // SAFETY: n elements, in place.
            unsafe { unary(op, x.array(), x.array(), n) }.unwrap();
            assert_eq!(x.values(), want[0]);
        }
        let (d, g, u) = (random(n, 1), random(n, 2), random(n, 3));
        // SAFETY: `run` passes arrays of its own, as long as the case says.
        let call = |from: &[Array], to: &[Array]| unsafe {
            swiglu_bwd([from[0], from[1], from[2]], [to[0], to[1]], n)
        };
        let case = Case {
            inputs: elements(&[d.clone(), g.clone(), u.clone()]),
            outputs: vec![(Elements, n); 2],
            call: &call,
        };
        let want = run(&case, float, &[]);
        let [d, g, u] = [d, g, u].map(|x| Memory::new(float, &x));
        // SAFETY: n elements, in place.
        unsafe { swiglu_bwd([&d, &g, &u].map(Memory::array), [&g, &u].map(Memory::array), n) }.unwrap();
        assert_eq!([g.values(), u.values()].as_slice(), want);
    }
}

#[test]
fn threads_change_no_bit() {
    let n = (1 << 21) + 33;
    let (x, y) = (random(n, 1), random(n, 2));
    // SAFETY: `run` passes arrays of its own, as long as the case says.
    let call =
        |from: &[Array], to: &[Array]| unsafe { unary_bwd(UnaryFn::GeluErf, [from[0], from[1]], to[0], n) };
    let case = Case { inputs: elements(&[x.clone(), y.clone()]), outputs: vec![(Elements, n)], call: &call };
    threads_agree(&case, "unary_bwd");
    // SAFETY: `run` passes arrays of its own, as long as the case says.
    let call = |from: &[Array], to: &[Array]| unsafe { binary(BinaryFn::Mul, [from[0], from[1]], to[0], n) };
    threads_agree(&Case { call: &call, ..case }, "binary");
}
