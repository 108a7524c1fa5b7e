//! The oracle: every op implemented directly from its documented formula, in f64, in the simplest code. Slow but
//! correct.

mod activation;
pub(crate) mod attention;
mod collective;
mod dropout;
mod elementwise;
mod embedding;
mod fp8;
mod fused;
mod grouped;
mod grouped_fp8;
mod grouped_lora;
pub(crate) mod layernorm;
mod linear;
mod lora;
mod loss;
mod matmul;
mod memory;
mod muon;
mod optimizer;
mod pools;
mod preference;
mod qk_norm;
pub(crate) mod rmsnorm;
mod rope;
mod router;
mod routing;
mod swiglu;

pub(crate) use fused::parts;
pub(crate) use pools::Pools;

pub use activation::activation;

use ironhorse_core::op::{Op, check_at_positions, check_positions};
use ironhorse_core::{
    DType, DeviceDescription, Engine, EngineExt, Error, HostSlice, HostSliceMut, Layout, MemoryUse, Param,
    Program, Result, Scalars, Slot, bf16_to_f32, f32_to_bf16,
};
use std::ops::Range;

/// Runs any program in f64. Results are never rounded; only [`Engine::read`] converts.
#[derive(Debug)]
pub struct OracleEngine {
    device: DeviceDescription,
    pools: Pools,
}

/// What an op may read besides its slots.
#[derive(Clone, Copy)]
pub(crate) struct Step<'a> {
    pub params: &'a [Param],
    pub scalars: &'a Scalars,
}

impl Default for OracleEngine {
    fn default() -> Self {
        Self::new()
    }
}

impl OracleEngine {
    /// An oracle without memory yet.
    pub fn new() -> Self {
        Self { device: DeviceDescription::host("oracle"), pools: Pools::default() }
    }

    /// The elements of a slot in f64.
    pub fn read_f64(&self, slot: Slot) -> Result<Vec<f64>> {
        self.pools.read(slot)
    }

    #[cfg(test)]
    pub(crate) fn pools_mut(&mut self) -> &mut Pools {
        &mut self.pools
    }

    /// Sets the elements of a slot without rounding.
    pub fn write_f64(&mut self, slot: Slot, values: &[f64]) -> Result<()> {
        self.pools.write(slot, values)
    }
}

/// Runs one op; a fused op as its parts.
pub(crate) fn execute(pools: &mut Pools, op: &Op, step: Step) -> Result<()> {
    op.check()?;
    match op {
        Op::EmbeddingFwd(op) => embedding::fwd(pools, op, step),
        Op::EmbeddingBwd(op) => embedding::bwd(pools, op, step),
        Op::LayerNormFwd(op) => layernorm::fwd(pools, op),
        Op::LayerNormApply(op) => layernorm::apply(pools, op),
        Op::LayerNormBwd(op) => layernorm::bwd(pools, op, step),
        Op::RmsNormFwd(op) => rmsnorm::fwd(pools, op),
        Op::RmsNormApply(op) => rmsnorm::apply(pools, op),
        Op::RmsNormBwd(op) => rmsnorm::bwd(pools, op, step),
        Op::LinearFwd(op) if op.pre.is_none() => linear::fwd(pools, op),
        Op::LinearBwdInput(op) if op.pre.is_none() => linear::bwd_input(pools, op),
        Op::LinearBwdWeight(op) => linear::bwd_weight(pools, op, step),
        Op::LoraFwd(op) => lora::fwd(pools, op),
        Op::LoraBwdHidden(op) => lora::bwd_hidden(pools, op),
        Op::LoraBwdWeight(op) => lora::bwd_weight(pools, op, step),
        Op::LoraBwdInput(op) => lora::bwd_input(pools, op),
        Op::ActFwd(op) => activation::fwd(pools, op),
        Op::ActBwd(op) => activation::bwd(pools, op),
        Op::SwigluFwd(op) => swiglu::fwd(pools, op),
        Op::SwigluBwd(op) => swiglu::bwd(pools, op),
        Op::Add(op) => elementwise::add(pools, op),
        Op::QkNormFwd(op) => qk_norm::fwd(pools, op),
        Op::QkNormBwd(op) => qk_norm::bwd(pools, op, step),
        Op::Rope(op) => rope::rope(pools, op, step),
        Op::AttentionFwd(op) => attention::fwd(pools, op, None),
        Op::AttentionBwd(op) => attention::bwd(pools, op, None),
        Op::AttentionCached(op) => attention::cached(pools, op, step),
        Op::Dropout(op) => dropout::dropout(pools, op, step),
        Op::AttentionDropoutFwd(op) => {
            let drop = dropout::Factors::new(op.drop, step.scalars, op.out.shape.dims()[1]);
            attention::fwd(pools, &op.attention(), Some(drop))
        }
        Op::AttentionDropoutBwd(op) => {
            let drop = dropout::Factors::new(op.drop, step.scalars, op.out.shape.dims()[1]);
            attention::bwd(pools, &op.attention(), Some(drop))
        }
        Op::RouterFwd(op) => router::fwd(pools, op),
        Op::RouterBwd(op) => router::bwd(pools, op, step),
        Op::RouterLoad(op) => router::load(pools, op, step),
        Op::RouteSort(op) => routing::sort(pools, op),
        Op::Permute(op) => routing::permute(pools, op),
        Op::PermuteBwd(op) => routing::permute_bwd(pools, op, step),
        Op::Combine(op) => routing::combine(pools, op),
        Op::CombineBwd(op) => routing::combine_bwd(pools, op),
        Op::GroupedLinearFwd(op) => grouped::fwd(pools, op),
        Op::GroupedLinearBwdInput(op) => grouped::bwd_input(pools, op),
        Op::GroupedLinearBwdWeight(op) => grouped::bwd_weight(pools, op, step),
        Op::GroupedLoraFwd(op) => grouped_lora::fwd(pools, op),
        Op::GroupedLoraBwdHidden(op) => grouped_lora::bwd_hidden(pools, op),
        Op::GroupedLoraBwdWeight(op) => grouped_lora::bwd_weight(pools, op, step),
        Op::GroupedLoraBwdInput(op) => grouped_lora::bwd_input(pools, op),
        Op::CrossEntropy(op) => loss::cross_entropy(pools, op, step),
        Op::CrossEntropyBwd(op) => loss::cross_entropy_bwd(pools, op, step),
        Op::Argmax(op) => loss::argmax(pools, op),
        Op::LossMean(op) => loss::mean(pools, op, step),
        Op::Preference(op) => preference::preference(pools, op, step),
        Op::GradNorm(op) => optimizer::grad_norm(pools, op),
        Op::AdamW(op) => optimizer::adamw(pools, op, step),
        Op::MuonMomentum(op) => muon::momentum(pools, op, step),
        Op::Matmul(op) => matmul::matmul(pools, op),
        Op::MuonUpdate(op) => muon::update(pools, op, step),
        Op::Amax(op) => fp8::amax(pools, op),
        Op::Quantize(op) => fp8::quantize(pools, op, step),
        Op::ScaleUpdate(op) => fp8::scale_update(pools, op),
        Op::MatmulFp8(op) => fp8::matmul_fp8(pools, op, step),
        Op::GroupedFp8(op) => grouped_fp8::rows(pools, op),
        Op::GroupedFp8BwdWeight(op) => grouped_fp8::weight(pools, op, step),
        Op::Fill(op) => memory::fill(pools, op),
        Op::CopySlot(op) => memory::copy(pools, op),
        Op::Exchange(op) => collective::exchange(pools, op),
        Op::TreeSum(op) => collective::tree_sum(pools, op),
        Op::AllGather(op) => collective::all_gather(pools, op),
        Op::ResidualLayerNormFwd(_)
        | Op::ResidualRmsNormFwd(_)
        | Op::LinearFwd(_)
        | Op::LinearBwdInput(_) => parts(op).iter().try_for_each(|part| execute(pools, part, step)),
    }
}

/// The position of each token (B,T) where sequences hold several documents.
pub(crate) fn positions(pools: &Pools, slot: Option<Slot>, seq: usize) -> Result<Option<Vec<f64>>> {
    let Some(slot) = slot else { return Ok(None) };
    let positions = pools.read(slot)?;
    check_positions(&positions.iter().map(|&x| x as i32).collect::<Vec<_>>(), seq)?;
    Ok(Some(positions))
}

/// The position of each token that continues a sequence in a cache; 0 for those that are not used.
pub(crate) fn at_positions(pools: &Pools, slot: Option<Slot>, context: usize) -> Result<Option<Vec<f64>>> {
    let Some(slot) = slot else { return Ok(None) };
    let positions = pools.read(slot)?;
    check_at_positions(&positions.iter().map(|&x| x as i32).collect::<Vec<_>>(), context)?;
    Ok(Some(positions.into_iter().map(|position| position.max(0.0)).collect()))
}

/// A token or target as an index, or an input error.
pub(crate) fn index(value: f64, limit: usize, what: &str) -> Result<usize> {
    if value >= 0.0 && value < limit as f64 {
        return Ok(value as usize);
    }
    Err(Error::Input(format!("{what} {value} is outside the vocabulary of {limit}")))
}

impl Engine for OracleEngine {
    fn device(&self) -> &DeviceDescription {
        &self.device
    }

    fn memory(&self) -> MemoryUse {
        let allocated = self.pools.bytes();
        MemoryUse { allocated, by_category: vec![("pools".into(), allocated)], ..MemoryUse::default() }
    }

    fn reserve(&mut self, layout: &Layout) -> Result<()> {
        self.pools.reserve(layout);
        Ok(())
    }

    fn write(&mut self, slot: Slot, data: HostSlice<'_>) -> Result<()> {
        data.check(&slot)?;
        let values: Vec<f64> = match data {
            HostSlice::F32(data) if slot.dtype == DType::BF16 => {
                data.iter().map(|&value| bf16_to_f32(f32_to_bf16(value)).into()).collect()
            }
            HostSlice::F32(data) => match slot.dtype {
                DType::F8(format) => {
                    data.iter().map(|&value| format.decode(format.encode(value)).into()).collect()
                }
                _ => data.iter().map(|&value| value.into()).collect(),
            },
            HostSlice::I32(data) => data.iter().map(|&value| value.into()).collect(),
            HostSlice::Bytes(data) => return self.write_bytes_as_values(slot, data),
        };
        self.pools.write(slot, &values)
    }

    fn read(&mut self, slot: Slot, out: HostSliceMut<'_>) -> Result<()> {
        out.check(&slot)?;
        let values = self.pools.read(slot)?;
        match out {
            HostSliceMut::F32(out) => out.iter_mut().zip(values).for_each(|(to, from)| *to = from as f32),
            HostSliceMut::I32(out) => out.iter_mut().zip(values).for_each(|(to, from)| *to = from as i32),
            HostSliceMut::Bytes(out) => return self.read_bytes_as_values(slot, out),
        }
        Ok(())
    }

    fn run(&mut self, program: &Program, ops: Range<usize>, scalars: &Scalars) -> Result<()> {
        let count = program.nodes().len();
        let Some(nodes) = program.nodes().get(ops.clone()) else {
            return Err(Error::Program(format!("ops {ops:?} are out of range 0..{count}")));
        };
        let step = Step { params: program.params(), scalars };
        nodes.iter().try_for_each(|node| execute(&mut self.pools, &node.op, step))
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironhorse_core::{Builder, Fp8};

    /// The oracle holds f64: bytes become elements and the same bytes again, in every element type.
    #[test]
    fn bytes_survive_in_every_element_type() {
        for (dtype, bytes) in [
            (DType::F32, [0_u8, 0, 0xc0, 0x3f, 1, 0, 0, 0]),
            (DType::I32, [0xff, 0xff, 0xff, 0x7f, 1, 0, 0, 0x80]),
            (DType::BF16, [0xc0, 0x3f, 1, 0, 0x80, 0xff, 0x80, 0x7f]),
            (DType::I16, [0xff, 0x7f, 0, 0x80, 0xff, 0xff, 1, 0]),
            (DType::F8(Fp8::E4M3), [0, 1, 0x7e, 0x80, 0x38, 0xb9, 0xfe, 0x08]),
        ] {
            let mut b = Builder::new();
            let slot = b.io("x", [8 / dtype.size()], dtype);
            let (mut oracle, mut again) = (OracleEngine::new(), [0; 8]);
            oracle.reserve(b.finish().unwrap().layout()).unwrap();
            oracle.write_bytes(slot, &bytes).unwrap();
            oracle.read_bytes(slot, &mut again).unwrap();
            assert_eq!(again, bytes, "{dtype}");
            assert!(oracle.read_bytes(slot, &mut [0; 7]).is_err());
            assert_eq!(oracle.read_i32(slot, &mut [0; 2]).is_ok(), dtype == DType::I32);
        }
    }
}
