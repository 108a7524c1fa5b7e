//! Rotary position embedding.

use super::{Pools, Step, at_positions, positions};
use ironhorse_core::op::{Rope, RopeScaling};
use ironhorse_core::{Error, Result};
use std::f64::consts::PI;

pub(super) fn rope(pools: &mut Pools, op: &Rope, step: Step) -> Result<()> {
    let dims = op.qkv.shape.dims();
    let (batch, seq, width) = (dims[0], dims[1], dims[2]);
    let hd = width / (op.heads + 2 * op.kv_heads);
    let start = if op.at_position && op.positions.is_none() { step.scalars.position as usize } else { 0 };
    if start + seq > op.context {
        let (end, context) = (start + seq, op.context);
        return Err(Error::Input(format!("positions {start}..{end} are beyond the context of {context}")));
    }
    let theta = f64::from(op.base) * f64::from(op.alpha).powf(hd as f64 / (hd as f64 - 2.0));
    let positions = if op.at_position {
        at_positions(pools, op.positions, op.context)?
    } else {
        positions(pools, op.positions, seq)?
    };
    let mut qkv = pools.read(op.qkv)?;
    for b in 0..batch {
        for t in 0..seq {
            for h in 0..op.heads + op.kv_heads {
                let head = (b * seq + t) * width + h * hd;
                for i in 0..hd / 2 {
                    let speed = scaled(theta.powf(-2.0 * i as f64 / hd as f64), op.scaling);
                    let at = positions.as_ref().map_or((start + t) as f64, |at| at[b * seq + t]);
                    let angle = at * speed;
                    let (sin, cos) = if op.back { (-angle).sin_cos() } else { angle.sin_cos() };
                    let (x, y) = (qkv[head + i], qkv[head + i + hd / 2]);
                    qkv[head + i] = x * cos - y * sin;
                    qkv[head + i + hd / 2] = x * sin + y * cos;
                }
            }
        }
    }
    pools.write(op.qkv, &qkv)
}

/// The speed of a pair after scaling, as the Llama 3.1 paper's code decides it: by wavelengths.
fn scaled(speed: f64, scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => speed,
        RopeScaling::Linear { factor } => speed / factor,
        RopeScaling::Llama3 { factor, low, high, original } => {
            let (wavelength, original) = (2.0 * PI / speed, f64::from(original));
            if wavelength > original / low {
                speed / factor
            } else if wavelength < original / high {
                speed
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                (1.0 - smooth) * speed / factor + smooth * speed
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Rope, RopeScaling};

    fn case(position: u32, back: bool) -> (Kit, Rope) {
        let mut kit = Kit::new("rope");
        kit.scalars.position = position;
        let op = Rope {
            // two query heads, one key head, one value head; head dimension 2
            qkv: kit.f32s([1, 1, 8], &[1.0, 0.0, 0.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
            heads: 2,
            kv_heads: 1,
            base: 10_000.0,
            alpha: 4.0,
            scaling: RopeScaling::None,
            back,
            at_position: true,
            positions: None,
            context: 8,
        };
        (kit, op)
    }

    /// With head dimension 2 there is one pair, which rotates by one radian per position.
    #[test]
    fn by_hand() {
        let (sin, cos) = 3.0_f64.sin_cos();
        let (kit, op) = case(3, false);
        let want = [cos, sin, -2.0 * sin, 2.0 * cos, 3.0 * cos - 4.0 * sin, 3.0 * sin + 4.0 * cos, 5.0, 6.0];
        kit.finish(op).expect_within(op.qkv, &want, 1e-12);
        let (kit, op) = case(3, true);
        let want = [cos, -sin, 2.0 * sin, 2.0 * cos, 3.0 * cos + 4.0 * sin, -3.0 * sin + 4.0 * cos, 5.0, 6.0];
        kit.finish(op).expect_within(op.qkv, &want, 1e-12);
        let (kit, op) = case(8, false);
        assert!(kit.finish(op).oracle().unwrap_err().to_string().contains("context of 8"));
    }

    /// A pair is one element of each half; the second of two pairs rotates by θ^(-1/2) = (100·4²)^(-1/2) = 1/40.
    #[test]
    fn pairs_and_frequencies_by_hand() {
        let mut kit = Kit::new("rope");
        let op = Rope {
            qkv: kit.f32s([1, 2, 12], &[1.0; 24]),
            heads: 1,
            kv_heads: 1,
            base: 100.0,
            alpha: 4.0,
            scaling: RopeScaling::None,
            back: false,
            at_position: false,
            positions: None,
            context: 2,
        };
        let ((s, c), (s2, c2)) = (1.0_f64.sin_cos(), (1.0_f64 / 40.0).sin_cos());
        let turned = [c - s, c2 - s2, s + c, s2 + c2];
        let want: Vec<f64> = [[1.0; 4], [1.0; 4], [1.0; 4], turned, turned, [1.0; 4]].concat();
        kit.finish(op).expect_within(op.qkv, &want, 1e-7);
    }
}
