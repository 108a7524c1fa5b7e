//! Checks what an update stores in 16 bits: weights with an f32 master, weights with a residual, and moments.

use crate::Case;
use crate::case::read;
use crate::report::Fault;
use ironhorse_core::op::{Arg, Op};
use ironhorse_core::{
    DType, Engine, Param, Pool, RandomRounding, Result, Slot, bf16_to_f32, f32_to_bf16, join_master,
};

/// The master weights of the oracle and the engine if they are stored as weights and residuals, else `None`.
pub(crate) fn masters(
    engine: &mut dyn Engine,
    case: &Case,
    expected: &[Vec<f64>],
) -> Result<Option<(Vec<f64>, Vec<f32>)>> {
    let Some([params, master]) = case.op().masters().filter(|_| !case.exact) else { return Ok(None) };
    if master.dtype != DType::I16 {
        return Ok(None);
    }
    let join = |weight: f32, residual: f32| join_master(f32_to_bf16(weight), residual as i16);
    let (want, residuals) = (of(case.op(), expected, "params"), of(case.op(), expected, "master"));
    let want = want.iter().zip(residuals).map(|(&w, &r)| join(w as f32, r as f32).into()).collect();
    let (params, residuals) = (read(engine, params)?, read(engine, master)?);
    Ok(Some((want, params.iter().zip(residuals).map(|(&w, r)| join(w, r)).collect())))
}

/// The oracle's contents of one of the written slots.
fn of<'a>(op: &Op, expected: &'a [Vec<f64>], name: &str) -> &'a [f64] {
    let written = op.args().into_iter().filter(|arg| arg.access.writes());
    let found = written.zip(expected).find(|(arg, _)| arg.name == name);
    found.map_or(&[], |(_, values)| values)
}

/// Checks that weights and moments are rounded correctly.
pub(crate) fn check_rounding(
    engine: &mut dyn Engine,
    case: &Case,
    expected: &[Vec<f64>],
) -> Result<Result<(), Fault>> {
    if case.exact {
        return Ok(Ok(()));
    }
    if let Some([params, master]) = case.op().masters().filter(|[_, master]| master.dtype == DType::F32) {
        let weights = check_weights(engine, case, [params, master])?;
        if weights.is_err() {
            return Ok(weights);
        }
    }
    for arg in case.op().args().into_iter().filter(|arg| arg.access.writes() && arg.slot.dtype == DType::BF16)
    {
        if matches!(arg.slot.pool, Pool::Moment1 | Pool::Moment2) {
            let moments = check_moments(engine, case, &arg, of(case.op(), expected, arg.name))?;
            if moments.is_err() {
                return Ok(moments);
            }
        }
    }
    Ok(Ok(()))
}

/// The index in the parameter pool of every element of a pool of moments: it decides about the random bits.
pub(crate) fn places(params: &[Param], slot: Slot) -> Vec<u64> {
    let mut places: Vec<u64> = (0..slot.numel() as u64).collect();
    for param in params {
        let held = param.in_pool(slot.pool);
        let first = held.offset / held.dtype.size();
        for (place, i) in places.iter_mut().skip(first).take(held.numel()).zip(param.elements()) {
            *place = i as u64;
        }
    }
    places
}

/// Checks that every bf16 moment has exactly the bits of [`RandomRounding`] of the oracle's value, up to the rounding
/// error of f32 arithmetic: four rounding errors of the largest value of the slot.
fn check_moments(engine: &mut dyn Engine, case: &Case, arg: &Arg, want: &[f64]) -> Result<Result<(), Fault>> {
    let rounding = RandomRounding::new(case.scalars.seed, case.scalars.step);
    let (which, name) = (usize::from(arg.slot.pool == Pool::Moment2), arg.name);
    let got = read(engine, arg.slot)?;
    let slack = 2.0_f64.powi(-22) * want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let places = places(case.program.params(), arg.slot);
    for (i, ((&got, &want), place)) in got.iter().zip(want).zip(places).enumerate() {
        let rounded = |x: f64| bf16_to_f32(rounding.moments(place, [x as f32; 2])[which]);
        let (low, high) = (rounded(want - slack), rounded(want + slack));
        if !(low..=high).contains(&got) {
            let what =
                format!("`{name}`[{i}] is {got:e}, expected {low:e}: {want:e} rounded with its random bits");
            return Ok(Err(Fault::Rounding(what)));
        }
    }
    Ok(Ok(()))
}

/// Checks that bf16 weights are stochastically rounded masters: each is one of the two neighbours, three of four are
/// the nearer one, and the mean error is 0. The statistics are only checked on at least 500 weights.
fn check_weights(engine: &mut dyn Engine, case: &Case, slots: [Slot; 2]) -> Result<Result<(), Fault>> {
    let (params, masters) = (read(engine, slots[0])?, read(engine, slots[1])?);
    let (mut count, mut nearer, mut mean) = (0.0_f64, 0.0, 0.0);
    for range in case.op().updates(case.program.params()) {
        for i in range {
            let (rounded, exact) = (params[i], masters[i]);
            let below = bf16_to_f32((exact.to_bits() >> 16) as u16); // towards 0
            let above = bf16_to_f32(((exact.to_bits() >> 16) as u16).wrapping_add(1));
            if exact == below && rounded == exact {
                continue; // exactly representable
            }
            if rounded != below && rounded != above {
                let what = format!(
                    "`params`[{i}] is {rounded:e}, expected a bf16 neighbour of its master {exact:e}"
                );
                return Ok(Err(Fault::Rounding(what)));
            }
            count += 1.0;
            nearer += f64::from(u8::from(rounded == bf16_to_f32(f32_to_bf16(exact))));
            mean += f64::from(rounded - exact) / f64::from(above - below).abs();
        }
    }
    let (nearer, mean) = (nearer / count, mean / count);
    // Six standard deviations, each below 0.5/√count.
    let slack = 3.0 / count.sqrt();
    if count < 500.0 || ((nearer - 0.75).abs() < slack && mean.abs() < slack) {
        return Ok(Ok(()));
    }
    let what = format!(
        "`params` are not rounded stochastically: {nearer:.3} of {count} to the nearer neighbour, expected 0.75; mean error \
         {mean:.4} of a step, expected 0"
    );
    Ok(Err(Fault::Rounding(what)))
}
