//! The blocks kernels share with the host: per-step numbers in, faults out.

use ironhorse_core::Scalars;
use ironhorse_core::op::{bad_at_position, bad_cache_row, bad_pair, bad_position};

/// `struct Scalars` of common/prelude.cuh, word by word.
pub(crate) const SCALAR_BYTES: usize = 72;

/// The block for these scalars. What needs f64 (1 - βᵗ) is computed here.
pub(crate) fn scalar_block(s: &Scalars) -> [u8; SCALAR_BYTES] {
    let power = |beta: f64| 1.0 - beta.powi(s.step.min(i32::MAX as u32) as i32);
    let words: [u32; 14] = [
        s.step,
        s.micro_step,
        s.loss_scale.to_bits(),
        s.lr.to_bits(),
        (s.beta1 as f32).to_bits(),
        (s.beta2 as f32).to_bits(),
        ((1.0 - s.beta1) as f32).to_bits(),
        ((1.0 - s.beta2) as f32).to_bits(),
        ((1.0 / power(s.beta1)) as f32).to_bits(),
        ((1.0 / power(s.beta2)) as f32).to_bits(),
        s.eps.to_bits(),
        s.weight_decay.to_bits(),
        s.grad_clip.to_bits(),
        s.position,
    ];
    let mut bytes = [0; SCALAR_BYTES];
    for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    bytes[56..64].copy_from_slice(&s.seed.to_le_bytes());
    bytes[64..68].copy_from_slice(&s.counted.to_le_bytes());
    bytes
}

/// Bytes of `struct Fault`.
pub(crate) const FAULT_BYTES: usize = 16;

/// What a fault block says, if anything.
pub(crate) fn fault_text(block: &[u8]) -> Option<String> {
    let mut words = block.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let [code, value, index, limit] = [(); 4].map(|()| words.next().unwrap_or(0));
    Some(match code {
        0 => return None,
        3 => format!("router: a logit of token {index} is {}", f32::from_bits(value as u32)),
        4 => format!("expert index {value} is out of range 0..{limit}"),
        5 => format!("row index {value} is out of range 0..{limit}"),
        6 => format!("expert offset {index} is {value}; expected offsets that ascend from 0 to {limit}"),
        7 => bad_position(value, index as usize),
        9 => bad_at_position(value, index as usize, limit as usize),
        10 => bad_cache_row(value, index as usize, limit as usize),
        8 => bad_pair(value, index as usize, limit as usize),
        _ => {
            let what = if code == 1 { "token" } else { "target" };
            format!("{what} {value} at index {index} is outside the vocabulary of {limit}")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_the_layout_of_the_prelude() {
        let s =
            Scalars { step: 3, position: 7, counted: 0.5, seed: 0x1122_3344_5566_7788, ..Scalars::default() };
        let block = scalar_block(&s);
        let word = |i: usize| u32::from_le_bytes(block[4 * i..4 * i + 4].try_into().unwrap());
        assert_eq!((word(0), word(13)), (3, 7));
        assert_eq!((word(14), word(15)), (0x5566_7788, 0x1122_3344));
        assert_eq!(f32::from_bits(word(16)), 0.5);
        let correction = f64::from(f32::from_bits(word(9)));
        assert!((correction * (1.0 - 0.999_f64.powi(3)) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn faults_speak_like_the_cpu_engine() {
        let text = |words: [i32; 4]| {
            let block: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            fault_text(&block).unwrap_or_default()
        };
        let token = "token 70000 at index 5 is outside the vocabulary of 50257";
        assert_eq!(text([1, 70000, 5, 50257]), token);
        assert_eq!(text([2, -1, 0, 7]), "target -1 at index 0 is outside the vocabulary of 7");
        let infinite = f32::NEG_INFINITY.to_bits() as i32;
        assert_eq!(text([3, infinite, 40, 3]), "router: a logit of token 40 is -inf");
        assert_eq!(text([4, -1, 3, 4]), "expert index -1 is out of range 0..4");
        assert_eq!(text([5, 9, 3, 8]), "row index 9 is out of range 0..8");
        assert_eq!(text([6, 4, 2, 5]), "expert offset 2 is 4; expected offsets that ascend from 0 to 5");
        assert_eq!(text([7, 9, 3, 0]), bad_position(9, 3));
        assert_eq!(text([8, 9, 3, 8]), bad_pair(9, 3, 8));
        assert_eq!(text([9, -2, 3, 8]), bad_at_position(-2, 3, 8));
        assert_eq!(text([10, 4, 3, 2]), bad_cache_row(4, 3, 2));
        assert_eq!(fault_text(&[0; FAULT_BYTES]), None);
    }
}
