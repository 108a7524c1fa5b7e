//! Token plus position embedding.

use super::{Pools, Step, at_positions, index, positions};
use ironhorse_core::op::{EmbeddingBwd, EmbeddingFwd};
use ironhorse_core::{Error, Result};

pub(super) fn fwd(pools: &mut Pools, op: &EmbeddingFwd, step: Step) -> Result<()> {
    let (batch, seq, width) = (op.tokens.shape.rows(), op.tokens.shape.cols(), op.wte.shape.cols());
    let (tokens, wte) = (pools.read(op.tokens)?, pools.read(op.wte)?);
    let wpe = op.wpe.map(|wpe| pools.read(wpe)).transpose()?;
    let start = if op.at_position && op.positions.is_none() { step.scalars.position as usize } else { 0 };
    let context = op.wpe.map_or(usize::MAX, |wpe| wpe.shape.rows());
    if start + seq > context {
        return Err(Error::Input(format!(
            "positions {start}..{} are beyond the context of {context}",
            start + seq
        )));
    }
    let positions = if op.at_position {
        at_positions(pools, op.positions, context)?
    } else {
        positions(pools, op.positions, seq)?
    };
    let mut out = vec![0.0; batch * seq * width];
    for b in 0..batch {
        for t in 0..seq {
            let token = index(tokens[b * seq + t], op.vocab, "token")?;
            let place = positions.as_ref().map_or(start + t, |at| at[b * seq + t] as usize);
            for c in 0..width {
                let position = wpe.as_ref().map_or(0.0, |wpe| wpe[place * width + c]);
                out[(b * seq + t) * width + c] = f64::from(op.factor) * wte[token * width + c] + position;
            }
        }
    }
    pools.write(op.out, &out)
}

pub(super) fn bwd(pools: &mut Pools, op: &EmbeddingBwd, step: Step) -> Result<()> {
    let (batch, seq, width) = (op.tokens.shape.rows(), op.tokens.shape.cols(), op.d_wte.shape.cols());
    let (tokens, d_out) = (pools.read(op.tokens)?, pools.read(op.d_out)?);
    let positions = positions(pools, op.positions, seq)?;
    let mut d_wte = vec![0.0; op.d_wte.numel()];
    let mut d_wpe = vec![0.0; op.d_wpe.map_or(seq * width, |d_wpe| d_wpe.numel())];
    for b in 0..batch {
        for t in 0..seq {
            let token = index(tokens[b * seq + t], op.d_wte.shape.rows(), "token")?;
            let place = positions.as_ref().map_or(t, |at| at[b * seq + t] as usize);
            for c in 0..width {
                let d = d_out[(b * seq + t) * width + c];
                d_wte[token * width + c] += f64::from(op.factor) * d;
                d_wpe[place * width + c] += d;
            }
        }
    }
    pools.store(op.d_wte, &d_wte, op.accum_wte.adds(step.scalars.added()))?;
    match op.d_wpe {
        Some(slot) => pools.store(slot, &d_wpe, op.accum.adds(step.scalars.added())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use crate::Kit;
    use ironhorse_core::op::{Accum, EmbeddingBwd, EmbeddingFwd};

    fn fwd(at_position: bool, position: u32) -> (Kit, EmbeddingFwd) {
        let mut kit = Kit::new("embedding");
        kit.scalars.position = position;
        let op = EmbeddingFwd {
            out: kit.slot([2, 1, 2]),
            tokens: kit.i32s([2, 1], &[2, 0]),
            wte: kit.f32s([3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
            wpe: Some(kit.f32s([2, 2], &[10.0, 20.0, 30.0, 40.0])),
            positions: None,
            vocab: 3,
            at_position,
            factor: 1.0,
        };
        (kit, op)
    }

    #[test]
    fn fwd_by_hand() {
        let (kit, op) = fwd(false, 1);
        kit.finish(op).expect_f64(op.out, &[15.0, 26.0, 11.0, 22.0]);
        let (kit, op) = fwd(true, 1);
        kit.finish(op).expect_f64(op.out, &[35.0, 46.0, 31.0, 42.0]);
        let (kit, op) = fwd(true, 1000);
        kit.finish(EmbeddingFwd { wpe: None, ..op }).expect_f64(op.out, &[5.0, 6.0, 1.0, 2.0]);
    }

    #[test]
    fn what_is_out_of_range_is_refused() {
        let (kit, op) = fwd(true, 2);
        assert!(kit.finish(op).oracle().unwrap_err().to_string().contains("context of 2"));
        let (kit, op) = fwd(false, 0);
        let error = kit.finish(EmbeddingFwd { vocab: 2, ..op }).oracle().unwrap_err();
        assert_eq!(error.to_string(), "token 2 is outside the vocabulary of 2");
    }

    /// Token 1 occurs twice: its rows of d_out add up in d_wte. The third position of d_wpe is not below T.
    fn bwd(accum: Accum, d_wpe: [f32; 3]) {
        let mut kit = Kit::new("embedding");
        let op = EmbeddingBwd {
            d_wte: kit.f32s([2, 1], &[100.0, 200.0]),
            d_wpe: Some(kit.f32s([3, 1], &[7.0, 8.0, 9.0])),
            d_out: kit.f32s([2, 2, 1], &[1.0, 2.0, 3.0, 4.0]),
            tokens: kit.i32s([2, 2], &[1, 0, 1, 1]),
            positions: None,
            accum_wte: Accum::Add,
            accum,
            factor: 1.0,
        };
        let case = kit.finish(op);
        case.expect_f64(op.d_wte, &[102.0, 208.0]);
        case.expect_f64(op.d_wpe.unwrap(), &d_wpe.map(f64::from));
    }

    #[test]
    fn bwd_by_hand() {
        bwd(Accum::Add, [11.0, 14.0, 9.0]);
        bwd(Accum::Write, [4.0, 6.0, 0.0]);
        bwd(Accum::FirstWrites, [4.0, 6.0, 0.0]);
    }

    /// An untied table: rows of tokens that do not occur become 0.
    #[test]
    fn bwd_alone_by_hand() {
        let mut kit = Kit::new("embedding");
        let op = EmbeddingBwd {
            d_wte: kit.f32s([3, 1], &[100.0, 200.0, 300.0]),
            d_wpe: None,
            d_out: kit.f32s([1, 3, 1], &[1.0, 2.0, 3.0]),
            tokens: kit.i32s([1, 3], &[2, 0, 2]),
            positions: None,
            accum_wte: Accum::FirstWrites,
            accum: Accum::Write,
            factor: 1.0,
        };
        kit.finish(op).expect_f64(op.d_wte, &[2.0, 0.0, 4.0]);
    }
}
