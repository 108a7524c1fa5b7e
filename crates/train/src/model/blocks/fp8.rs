//! Linear layers whose products are of 8-bit numbers: the input, the weight and the gradient of the output are each scaled by a
//! power of two, rounded to 8 bits, and kept in rows and in columns, as the three products of a layer need them. Scales come from
//! the largest element of the tensor: that of earlier steps, or its own.
//!
//! | product | rows | columns | terms |
//! | --- | --- | --- | --- |
//! | out (N,OC) = inp · weightᵀ | inp (N,C) | weight (OC,C) | C |
//! | d_inp (N,C) = d_out · weight | d_out (N,OC) | weightᵀ (C,OC) | OC |
//! | d_weight (OC,C) = d_outᵀ · inp | d_outᵀ (OC,N) | inpᵀ (C,N) | N |

use super::adapter::is_frozen;
use super::head::HEAD;
use super::{Blocks, Linear};
use crate::Result;
use ironhorse_core::op::{Accum, Act, ActBwd, ActFwd, Amax, MatmulFp8, PreAct, Quantize, ScaleUpdate};
use ironhorse_core::{DType, Error, Fp8, Fp8Scales, Section, Slot};

/// What products of 8-bit numbers need of every size.
const MULTIPLE: usize = 16;
/// The sizes of experts that Hopper's kernels for them have: lines and terms of a weight are multiples of these, and there are at most
/// so many experts. In others 8 bits would be slower than bf16.
const EXPERTS: (usize, usize, usize) = (128, 64, 240);
/// The exponent of the scale of a tensor of zeros, which is 0 whatever its scale.
const OF_ZEROS: i32 = 0;
/// How many doublings of the largest element of earlier steps fit the format.
const ROOM: i32 = 1;
/// In a run's first step nothing is known of activations and gradients. Normalised activations are of size 1. Gradients of a mean over
/// N tokens are of size 1/N or some powers of two less, and e5m2 has 32 of those.
const FIRST_ACTIVATIONS: i32 = 3;
const FIRST_GRADIENTS: i32 = 6;

/// A tensor in 8 bits.
#[derive(Clone, Copy)]
struct Quantized {
    rows: Slot,
    columns: Slot,
    /// 1 over its scale.
    inverse: Slot,
}

/// What the forward of a layer leaves for its backward: input and weight in columns.
#[derive(Clone, Copy)]
pub(super) struct SavedFp8 {
    inp: Quantized,
    weight: Quantized,
    /// The gradient of the output, where the forward ends with it.
    d_out: Option<Quantized>,
}

/// What is rounded to 8 bits.
#[derive(Clone, Copy)]
struct Source {
    inp: Slot,
    /// The activation to apply first.
    act: Option<Act>,
    /// The activation whose derivative to multiply by first.
    pre: Option<PreAct>,
    /// The gradient of the bias: the sums over rows.
    d_bias: Option<Slot>,
    format: Fp8,
    kind: Kind,
}

/// Which of a layer's tensors.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Weight,
    Activation,
    Gradient,
}

/// How a tensor is scaled, wherever it is rounded to 8 bits.
#[derive(Clone, Copy)]
pub struct Scaling {
    amax: Slot,
    seen: Option<Slot>,
    margin: i32,
    unknown: i32,
    format: Fp8,
}

impl Scaling {
    /// The scaling of the same tensor when it is rounded once more and its largest element has been counted in this step.
    pub fn again(self) -> Self {
        Self { seen: None, ..self }
    }
}

/// A tensor in 8 bits, in rows or in columns or both.
#[derive(Clone, Copy)]
pub struct Narrow {
    pub rows: Option<Slot>,
    pub columns: Option<Slot>,
    /// 1 over its scale.
    pub inverse: Slot,
}

impl Narrow {
    fn both(self) -> Result<Quantized> {
        let Self { rows, columns, inverse } = self;
        match (rows, columns) {
            (Some(rows), Some(columns)) => Ok(Quantized { rows, columns, inverse }),
            _ => Err(Error::Program("a tensor in 8 bits without rows or columns".into()).into()),
        }
    }
}

/// Which of the two forms of a tensor in 8 bits to write.
#[derive(Clone, Copy)]
pub enum Form {
    Rows,
    Columns,
    Both,
}

impl Source {
    fn plain(inp: Slot, kind: Kind, format: Fp8) -> Self {
        Self { inp, act: None, pre: None, d_bias: None, format, kind }
    }

    /// How many doublings the result can be larger than the largest element of `inp`: |gelu(x)| ≤ |x|, and |gelu'| < 2.
    fn margin(&self) -> i32 {
        i32::from(self.pre.is_some())
    }
}

impl Blocks {
    /// Whether the products of this layer are of 8-bit numbers: not where the program has none, with adapters, or with sizes that such
    /// products do not have.
    pub fn is_fp8(&self, name: &str, p: &Linear) -> bool {
        let Some(products) = self.fp8 else { return false };
        let sizes = [self.tokens(), p.weight.shape.rows(), p.weight.shape.cols()];
        let fits = sizes.iter().all(|size| size.is_multiple_of(MULTIPLE));
        fits && !p.exact && p.adapter.is_none() && !is_frozen(p.weight) && (name != HEAD || products.head)
    }

    /// Whether the products of these weights of experts, with so many rows, are of 8-bit numbers.
    pub fn are_experts_fp8(&self, rows: usize, weights: &[Slot]) -> bool {
        let (lines_of, terms_of, most) = EXPERTS;
        let fits = weights.iter().all(|weight| match *weight.shape.dims() {
            [experts, lines, terms] => {
                lines.is_multiple_of(lines_of) && terms.is_multiple_of(terms_of) && experts <= most
            }
            _ => false,
        });
        fits && rows.is_multiple_of(MULTIPLE)
            && self.fp8.is_some_and(|products| products.experts)
            && !weights.iter().any(|weight| is_frozen(*weight))
    }

    /// Whether an activation is computed before its results are looked at for their scale: with current scales, where its input says
    /// nothing about them.
    fn comes_before_its_scale(&self, act: Act) -> bool {
        !act.is_bounded() && self.fp8.is_some_and(|fp8| fp8.scales == Fp8Scales::Current)
    }

    /// `out = inp · weightᵀ + bias`; with `act`, of the activation of `inp`.
    pub(super) fn linear_fp8(
        &mut self,
        name: &str,
        [out, inp]: [Slot; 2],
        act: Option<Act>,
        p: Linear,
    ) -> Result<()> {
        self.b.at(name);
        let (inp, act) = match act {
            Some(act) if self.comes_before_its_scale(act) => {
                let out = self.tokens_by(inp.shape.cols());
                self.b.push(ActFwd { out, inp, act })?;
                (out, None)
            }
            other => (inp, other),
        };
        let inp = self.quantize(Source { act, ..Source::plain(inp, Kind::Activation, Fp8::E4M3) })?;
        let weight = self.quantize_weight(p.weight)?;
        self.b.at(name);
        let forward = product(out, [inp.rows, weight.rows], [inp, weight], Accum::Write);
        self.b.push(MatmulFp8 { bias: p.bias, fast: true, ..forward })?;
        self.saved_fp8.insert(name.into(), SavedFp8 { inp, weight, d_out: None });
        Ok(())
    }

    /// The gradient of a layer's output in 8 bits right behind the op that computes it, so that an engine can do both at once; for a
    /// backward without an activation and a bias.
    pub(super) fn gradient_fp8(&mut self, name: &str, d_out: Slot) -> Result<()> {
        let d_out = self.quantize(Source::plain(d_out, Kind::Gradient, self.gradients_fp8()))?;
        if let Some(saved) = self.saved_fp8.get_mut(name) {
            saved.d_out = Some(d_out);
        }
        Ok(())
    }

    /// The format of gradients.
    pub fn gradients_fp8(&self) -> Fp8 {
        self.fp8.map_or(Fp8::E5M2, |products| products.gradients)
    }

    /// Both gradients, as [`Blocks::linear_bwd`], from what the forward saved; `[d_inp, d_out]`. With `pre`, `d_out` is the gradient of
    /// that activation of the layer's output.
    pub(super) fn linear_bwd_fp8(
        &mut self,
        name: &str,
        p: Linear,
        [d_inp, d_out]: [Slot; 2],
        pre: Option<PreAct>,
    ) -> Result<()> {
        let missing = || Error::Program(format!("{name}: a backward in 8 bits without a forward"));
        let SavedFp8 { inp, weight, d_out: there } = *self.saved_fp8.get(name).ok_or_else(missing)?;
        self.b.at(name);
        let pre = match pre {
            Some(PreAct { act, slot: inp }) if self.comes_before_its_scale(act) => {
                self.b.push(ActBwd { d_inp: d_out, d_out, inp, act })?;
                None
            }
            other => other,
        };
        let d_bias = p.bias.map(|bias| self.b.grad(bias));
        let source = Source { pre, d_bias, ..Source::plain(d_out, Kind::Gradient, self.gradients_fp8()) };
        let d_out = there.map_or_else(|| self.quantize(source), Ok)?;
        let accum = Accum::FirstWrites;
        let d_weight = self.b.grad(p.weight);
        self.b.push(product(d_weight, [d_out.columns, inp.columns], [d_out, inp], accum))?;
        self.b.push(product(d_inp, [d_out.rows, weight.columns], [d_out, weight], Accum::Write))?;
        Ok(())
    }

    fn quantize(&mut self, source: Source) -> Result<Quantized> {
        let scaling = self.scaling(source.inp, source.kind, source.format)?;
        // a margin on top of the room that scales of earlier steps leave would be twice the room
        let margin = if scaling.seen.is_some() { scaling.margin } else { source.margin() };
        let (op, narrow) = self.quantizing(source, Scaling { margin, ..scaling }, Form::Both);
        self.b.push(op)?;
        narrow.both()
    }

    /// A weight in 8 bits. In a forward all weights come ahead of everything else, first their largest elements and then their 8 bits, so
    /// that an engine can compute each for all of them at once: one weight is too small to keep a GPU busy. They are no layer's alone then.
    fn quantize_weight(&mut self, weight: Slot) -> Result<Quantized> {
        let source = Source::plain(weight, Kind::Weight, Fp8::E4M3);
        if self.b.in_section() != Section::Forward {
            return self.quantize(source);
        }
        self.b.at("weights in 8 bits");
        let scaling = self.current(source.format);
        let ahead = self.weights_fp8;
        self.weights_fp8 += 1;
        self.b.insert(ahead, Amax { amax: scaling.amax, inp: weight })?;
        let (op, narrow) = self.quantizing(source, scaling, Form::Both);
        self.b.insert(2 * ahead + 1, op)?;
        narrow.both()
    }

    /// How a tensor is scaled. Weights have current scales: they are few beside activations, and an update may change them by any
    /// factor.
    pub fn scaling(&mut self, inp: Slot, kind: Kind, format: Fp8) -> Result<Scaling> {
        let delayed = kind != Kind::Weight && self.fp8.is_some_and(|fp8| fp8.scales == Fp8Scales::Delayed);
        if !delayed {
            let scaling = self.current(format);
            self.b.push(Amax { amax: scaling.amax, inp })?;
            return Ok(scaling);
        }
        let [amax, seen] = self.b.scale();
        let unknown = match kind {
            Kind::Gradient => FIRST_GRADIENTS + self.tokens().ilog2() as i32,
            _ => FIRST_ACTIVATIONS,
        };
        Ok(Scaling { amax, seen: Some(seen), margin: ROOM, unknown, format })
    }

    /// A scaling by a largest element that is still to be computed.
    fn current(&mut self, format: Fp8) -> Scaling {
        let amax = self.b.activation([1], DType::F32);
        Scaling { amax, seen: None, margin: 0, unknown: OF_ZEROS, format }
    }

    /// A tensor in 8 bits as it is.
    pub fn narrow(&mut self, inp: Slot, scaling: Scaling, form: Form) -> Result<Narrow> {
        let source = Source::plain(inp, Kind::Activation, scaling.format);
        let (op, narrow) = self.quantizing(source, scaling, form);
        self.b.push(op)?;
        Ok(narrow)
    }

    /// The op that rounds to 8 bits, and its results.
    fn quantizing(&mut self, source: Source, scaling: Scaling, form: Form) -> (Quantize, Narrow) {
        let Source { inp, act, pre, d_bias, .. } = source;
        let Scaling { amax, seen, margin, unknown, format } = scaling;
        let (rows, cols) = (inp.shape.rows(), inp.shape.cols());
        let inverse = self.b.activation([1], DType::F32);
        // In an f32 program slots of f32 hold the numbers of the format.
        let held = if self.dtype() == DType::F32 { DType::F32 } else { DType::F8(format) };
        let [by_rows, by_columns] = match form {
            Form::Rows => [true, false],
            Form::Columns => [false, true],
            Form::Both => [true, true],
        };
        let out = by_rows.then(|| self.b.activation([rows, cols], held));
        let out_t = by_columns.then(|| self.b.activation([cols, rows], held));
        let accum = Accum::FirstWrites;
        let op = Quantize {
            out,
            out_t,
            inverse,
            d_bias,
            inp,
            pre,
            amax,
            seen,
            act,
            format,
            margin,
            unknown,
            accum,
        };
        (op, Narrow { rows: out, columns: out_t, inverse })
    }

    /// At the end of the update: the largest elements of this step become those of earlier steps.
    pub fn update_scales(&mut self) -> Result<()> {
        let scales = self.b.scales();
        if scales.numel() == 0 {
            return Ok(());
        }
        self.b.at("scales");
        Ok(self.b.push(ScaleUpdate { scales })?)
    }
}

/// `out (+)= a · bᵀ` of tensors in 8 bits, whose rows or columns `[a, b]` are.
fn product(out: Slot, [a, b]: [Slot; 2], of: [Quantized; 2], accum: Accum) -> MatmulFp8 {
    let [a_inverse, b_inverse] = of.map(|tensor| tensor.inverse);
    MatmulFp8 { out, bias: None, a, b, a_inverse, b_inverse, accum, fast: false }
}
