//! The one transformer that all families are: a decoder whose plan says which norms, positions and MLPs it has. Forward and
//! backward are written out op by op.
//!
//! The names given to activations are those of the reference models in Python, so an answer key can be compared with
//! each of them; B, T, C, V, L, NH, NKV, HD, E, K, F and N are defined in `docs/names.md`.
//!
//! | equation | op |
//! | --- | --- |
//! | x = embed\[tokens\], plus positions\[t\] in GPT-2 | `embedding_fwd` |
//! | h = x + proj(attention(rope(qkv(norm(x))))), without rope in GPT-2 | `linear_fwd`, `rope`, `attention_fwd`, `residual_..._fwd` |
//! | q_h, k_h = norm(q_h), norm(k_h) for each head h before rope, in Qwen 3 and Gemma 3 | `qk_norm_fwd` |
//! | h = x + norm(proj(…)), y = h + norm(down(…)), x = √C·embed\[tokens\] in Gemma 3, whose norms multiply by 1 + weight | `rmsnorm_fwd`, `embedding_fwd` |
//! | y = h + c_proj(gelu(c_fc(norm(h)))) in GPT-2 | `linear_fwd` |
//! | y = h + down(silu(gate norm(h)) · up norm(h)) in Llama, gelu in Gemma 3 | `linear_fwd`, `swiglu_fwd` |
//! | p = softmax(gate norm(h)), the K largest, their weights, in a mixture | `linear_fwd`, `router_fwd` |
//! | aux = alpha · E · Σ_e f_e · P_e | `router_load` |
//! | y = h + Σ_j weights_j · w2_e(silu(w1_e x) · w3_e x) | `route_sort`, `permute`, `grouped_linear_fwd`, `swiglu_fwd`, `combine` |
//! | loss = mean cross-entropy + Σ_layers aux | `cross_entropy`, `loss_mean`, `add` |

mod backward;
mod dropout;
mod expert_layer;
mod experts;
mod experts_fp8;
mod forward;
mod lora;
mod post_norm;
mod qk_norm;

use super::blocks::{Attention, Blocks, Head, Heads, Linear, Norm, NormWeights, Purpose, Setup};
use super::lora::Lora;
use super::{ModelConfig, ServingStep, StepOptions, Sums, Target};
use crate::Result;
use expert_layer::ExpertLayer;
use experts::{Experts, SavedExperts};
use ironhorse_core::op::{Act, Gain, Gate, RopeScaling};
use ironhorse_core::{DropRate, Precision, Program, Slot};

/// What a family calls the parameters of its experts.
#[derive(Clone, Copy)]
pub(super) struct ExpertNames {
    pub router: &'static str,
    /// What stands before the number of an expert.
    pub experts: &'static str,
    /// w1, w3 and w2 of the equations.
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

impl ExpertNames {
    /// The names of a family without experts.
    pub const NONE: Self = Self { router: "", experts: "", gate: "", up: "", down: "" };

    /// The name of an expert's weight, by its target; empty for those that are not experts'.
    pub fn of(&self, target: Target) -> &'static str {
        match target {
            Target::Gate => self.gate,
            Target::Up => self.up,
            Target::Down => self.down,
            Target::Q | Target::K | Target::V | Target::O => "",
        }
    }
}

/// What a family calls its parameters and activations.
#[derive(Clone, Copy)]
pub(super) struct Names {
    /// What stands before the number of a layer in the names of parameters, and in those of activations.
    pub layers: [&'static str; 2],
    pub embed: &'static str,
    /// The table of learned positions; `None` where positions are rotations.
    pub positions: Option<&'static str>,
    pub norm_1: &'static str,
    /// The first parameter of q, k and v, and their activation.
    pub qkv: [&'static str; 2],
    /// The activation of the attention.
    pub attn: &'static str,
    /// The parameter and the activation of the projection after the attention.
    pub proj: [&'static str; 2],
    /// The norm of that projection's result, where there is one.
    pub post_attn: Option<&'static str>,
    pub norm_2: &'static str,
    /// The norm of the MLP's result, where there is one.
    pub post_mlp: Option<&'static str>,
    /// The parameter and the activation of the last norm.
    pub last_norm: [&'static str; 2],
    /// The output head; the same parameter as `embed` where they are tied.
    pub head: &'static str,
    pub experts: ExpertNames,
    /// What a loss needs of the host, in the order of its memory.
    pub io: &'static [&'static str],
}

/// The part of a layer after the attention.
#[derive(Clone, Copy)]
pub(super) enum MlpKind {
    /// c_proj(act(c_fc x))
    Plain(Act),
    /// down(silu(gate x) · up x), or another function of the gate
    Swiglu(Gate),
    /// A mixture of `count` experts, of which a token uses `top_k`.
    Experts { count: usize, top_k: usize, aux_alpha: f32 },
}

/// How q and k turn with their positions.
#[derive(Clone, Copy)]
pub(super) struct Rotation {
    pub base: f32,
    pub alpha: f32,
    pub scaling: RopeScaling,
}

/// Everything that makes a family and a size.
pub(super) struct Plan {
    pub setup: Setup,
    /// The adapters that are trained in place of the weights, and the model that they belong to.
    pub lora: Option<(Lora, ModelConfig)>,
    pub names: Names,
    pub heads: Heads,
    /// `None` where positions are learned.
    pub rope: Option<Rotation>,
    /// The RoPE of layers with a window, if it is another.
    pub windowed_rope: Option<Rotation>,
    /// What q is multiplied by where each head of q and k is normalised before it turns.
    pub qk_norm: Option<f32>,
    /// How many keys a query reaches at most, layer by layer; empty where every layer reaches all.
    pub windows: Vec<Option<usize>>,
    pub norm_eps: f32,
    /// What RMS norms multiply by.
    pub gain: Gain,
    /// What embeddings are multiplied by, before it is rounded to their type.
    pub embed_factor: f64,
    /// V, and Vp with its padding.
    pub vocab: [usize; 2],
    /// F
    pub ffn: usize,
    pub mlp: MlpKind,
}

impl Plan {
    /// The plan for a context of at most this many positions, unless each position is a row of a table.
    fn within(mut self, positions: usize) -> Self {
        if self.names.positions.is_none() {
            self.setup.context = positions.clamp(1, self.setup.context);
        }
        self
    }
}

pub(super) fn training(
    plan: Plan,
    batch: (usize, usize),
    options: StepOptions,
    precision: Precision,
) -> Result<Program> {
    let mut decoder = Decoder::new(plan, batch, precision)?;
    (decoder.dropout, decoder.head_chunks) = (options.dropout, options.head_chunks);
    decoder.net.train_in_fp8(options.sums.is_some_and(|sums| sums.is_needed()));
    decoder.documents(&options);
    let saved = decoder.forward(Purpose::Training)?;
    decoder.backward(&saved, options.recompute)?;
    let sums = options.sums.filter(Sums::is_needed);
    if let Some(sums) = sums {
        decoder.net.sum(sums)?;
    }
    decoder.net.update(sums)?;
    decoder.net.update_scales()?;
    decoder.net.finish()
}

pub(super) fn evaluation(
    plan: Plan,
    batch: (usize, usize),
    options: StepOptions,
    precision: Precision,
) -> Result<Program> {
    let mut decoder = Decoder::new(plan, batch, precision)?;
    decoder.documents(&options);
    decoder.forward(Purpose::Evaluation)?;
    decoder.net.finish()
}

pub(super) fn scoring(plan: Plan, batch: (usize, usize), precision: Precision) -> Result<Program> {
    let mut decoder = Decoder::new(plan, batch, precision)?;
    let saved = decoder.forward(Purpose::Evaluation)?;
    decoder.net.best(&saved.head, decoder.plan.vocab[0])?;
    decoder.net.finish()
}

pub(super) fn logits(plan: Plan, batch: (usize, usize), precision: Precision) -> Result<Program> {
    let mut decoder = Decoder::new(plan, batch, precision)?;
    let logits = decoder.net.logits_io(decoder.head);
    let (_, norm) = decoder.blocks(Purpose::Evaluation)?;
    decoder.net.logits(norm.out, logits, decoder.head)?;
    decoder.net.finish()
}

/// One token for each of `batch` sequences, over a cache of at most so many positions.
pub(super) fn decoding(
    plan: Plan,
    batch: usize,
    positions: Option<usize>,
    precision: Precision,
) -> Result<Program> {
    let mut decoder = Decoder::caching(plan, batch, positions, precision)?;
    let logits = decoder.net.logits_io(decoder.head);
    let (_, norm) = decoder.blocks(Purpose::Decoding)?;
    decoder.net.logits(norm.out, logits, decoder.head)?;
    decoder.net.finish()
}

pub(super) fn serving(plan: Plan, step: ServingStep, precision: Precision) -> Result<Program> {
    let mut decoder = Decoder::caching(plan, step.tokens, step.context, precision)?;
    decoder.net.place(step.sequences);
    decoder.picks = step.picks;
    let logits = decoder.net.logits_of((step.picks.unwrap_or(step.tokens), 1), decoder.head);
    let (_, norm) = decoder.blocks(Purpose::Decoding)?;
    decoder.net.logits(norm.out, logits, decoder.head)?;
    decoder.net.finish()
}

/// The weights of the part of a layer after the attention.
#[derive(Clone, Copy)]
enum Mlp {
    Plain {
        act: Act,
        /// (4C,C)
        fc: Linear,
        /// (C,4C)
        proj: Linear,
    },
    Swiglu {
        gate: Gate,
        /// (2F,C), gate above up
        gate_up: Linear,
        /// (C,F)
        down: Linear,
    },
    Experts(Experts),
}

#[derive(Clone, Copy)]
struct Layer {
    norm_1: NormWeights,
    /// (W,C)
    qkv: Linear,
    /// (HD) of q, and of k
    qk_norm: Option<[Slot; 2]>,
    proj: Linear,
    /// The norm of the projection's result, if it has one.
    post_attn: Option<NormWeights>,
    norm_2: NormWeights,
    mlp: Mlp,
    /// The norm of the MLP's result, if it has one.
    post_mlp: Option<NormWeights>,
}

struct Decoder {
    net: Blocks,
    plan: Plan,
    embed: Slot,
    positions: Option<Slot>,
    layers: Vec<Layer>,
    norm: NormWeights,
    head: Slot,
    /// In training only.
    dropout: DropRate,
    /// Into how many parts the tokens are cut for the head and the loss, in training only.
    head_chunks: usize,
    /// The β of the loss of pairs, if that is the loss.
    preference: Option<f32>,
    /// Positions of the cache, when decoding.
    cached: usize,
    /// How many tokens have logits, when serving, if not all: the others end with the keys and values of the last layer.
    picks: Option<usize>,
}

/// What the MLP or the experts of a layer leave for the backward.
enum SavedMlp {
    /// The values before and after the activation.
    Dense {
        pre: Slot,
        act: Slot,
    },
    Experts(Box<SavedExperts>),
}

/// What the norm of q and k leaves for the backward.
#[derive(Clone, Copy)]
struct SavedQkNorm {
    /// (B,T,W), what went in.
    inp: Slot,
    /// (B,T,NH+NKV) f32
    rstd: Slot,
}

struct SavedLayer {
    norm_1: Norm,
    /// What the norm of q and k saves, if heads are normalised.
    qk_norm: Option<SavedQkNorm>,
    /// Attention over the rotated q and k, and v.
    attn: Attention,
    post_attn: Option<Norm>,
    norm_2: Norm,
    mlp: SavedMlp,
    post_mlp: Option<Norm>,
}

/// What the forward leaves for the backward.
struct Saved {
    layers: Vec<SavedLayer>,
    head: Head,
}

impl Decoder {
    fn new(mut plan: Plan, batch: (usize, usize), precision: Precision) -> Result<Self> {
        let (names, layers) = (plan.names, plan.setup.layers);
        let (width, context) = (plan.setup.width, plan.setup.context);
        let net = Blocks::new(&mut plan.setup, batch, precision)?;
        let vocab = [plan.vocab[1], width];
        let positions = names.positions.map(|name| net.weight(name, [context, width])).transpose()?;
        let layers = (0..layers).map(|l| layer(&net, &plan, l)).collect::<Result<_>>()?;
        let norm = net.norm_weights(names.last_norm[0], (plan.norm_eps, plan.gain))?;
        let (embed, head) = (net.weight(names.embed, vocab)?, net.weight(names.head, vocab)?);
        let (dropout, preference, head_chunks) = (DropRate::default(), None, 1);
        let (cached, picks) = (context, None);
        Ok(Self {
            net,
            plan,
            embed,
            positions,
            layers,
            norm,
            head,
            dropout,
            head_chunks,
            preference,
            cached,
            picks,
        })
    }

    /// For new tokens over a cache. All programs of a session must agree on its positions, as they share it.
    fn caching(plan: Plan, tokens: usize, positions: Option<usize>, precision: Precision) -> Result<Self> {
        let positions = positions.unwrap_or(plan.setup.context).clamp(1, plan.setup.context);
        let mut decoder = Self::new(plan.within(positions), (tokens, 1), precision)?;
        decoder.cached = positions;
        decoder.net.b.keep_activations(1); // an engine can compute a norm together with the layer after it
        Ok(decoder)
    }

    /// Whether sequences hold several documents, and whether these are pairs.
    fn documents(&mut self, options: &StepOptions) {
        if options.packed {
            self.net.pack();
        }
        self.preference = options.preference;
    }

    /// The name of a layer's activation.
    fn name(&self, l: usize, part: &str) -> String {
        format!("{}.{l}.{part}", self.plan.names.layers[1])
    }
}

/// The weights of a layer, by their names.
fn layer(net: &Blocks, plan: &Plan, l: usize) -> Result<Layer> {
    let Plan { names, heads, ffn, norm_eps, gain, .. } = *plan;
    let c = plan.setup.width;
    let name = |part: &str| format!("{}.{l}.{part}", names.layers[0]);
    let linear = |part: &str, dims: [usize; 2]| net.linear_weights(&name(part), dims);
    let adapter = |weight: Slot, target: Target| lora::adapter(net, plan, (l, target), weight);
    let adapted = |layer: Linear, target: Target| -> Result<Linear> {
        Ok(Linear { adapter: adapter(layer.weight, target)?, ..layer })
    };
    let of_experts = |weight: Slot, target: Target| -> Result<ExpertLayer> {
        Ok(ExpertLayer { weight, adapter: adapter(weight, target)? })
    };
    let mlp = match plan.mlp {
        MlpKind::Plain(act) => {
            Mlp::Plain { act, fc: linear("mlp.c_fc", [ffn, c])?, proj: linear("mlp.c_proj", [c, ffn])? }
        }
        MlpKind::Swiglu(gate) => Mlp::Swiglu {
            gate,
            gate_up: adapted(linear("mlp.gate_proj", [2 * ffn, c])?, Target::Gate)?,
            down: adapted(linear("mlp.down_proj", [c, ffn])?, Target::Down)?,
        },
        MlpKind::Experts { count, top_k, aux_alpha } => {
            let ExpertNames { router, experts, gate, down, .. } = names.experts;
            let expert =
                |part: &str, dims: [usize; 3]| net.weight(&name(&format!("{experts}.0.{part}.weight")), dims);
            Mlp::Experts(Experts {
                gate: Linear { exact: true, ..linear(router, [count, c])? },
                w13: of_experts(expert(gate, [count, 2 * ffn, c])?, Target::Gate)?,
                w2: of_experts(expert(down, [count, c, ffn])?, Target::Down)?,
                top_k,
                aux_alpha,
            })
        }
    };
    let rows = (heads.query + 2 * heads.kv) * heads.dim;
    let head_norm = |part: &str| net.weight(&name(&format!("self_attn.{part}.weight")), [heads.dim]);
    let has_qk_norm = plan.qk_norm.is_some();
    let qk_norm = if has_qk_norm { Some([head_norm("q_norm")?, head_norm("k_norm")?]) } else { None };
    let norm = |part: &str| net.norm_weights(&name(part), (norm_eps, gain));
    Ok(Layer {
        norm_1: norm(names.norm_1)?,
        qkv: adapted(linear(names.qkv[0], [rows, c])?, Target::Q)?,
        qk_norm,
        proj: adapted(linear(names.proj[0], [c, heads.query * heads.dim])?, Target::O)?,
        post_attn: names.post_attn.map(norm).transpose()?,
        norm_2: norm(names.norm_2)?,
        mlp,
        post_mlp: names.post_mlp.map(norm).transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelConfig;
    use ironhorse_core::op::{AttentionMask, Op};
    use ironhorse_testkit::{ProgramGradients, check_program_gradients};

    /// A Qwen 3 whose second layer has a window of this many keys.
    fn windowed(window: usize) -> Plan {
        let sizes = "kind=qwen3,hidden=8,layers=2,heads=2,kv_heads=1,ffn=6,vocab=11,context=9,window_from=1";
        match ModelConfig::parse(&format!("{sizes},window={window}")).unwrap() {
            ModelConfig::Moe(config) => config.plan(),
            ModelConfig::Gpt2(_) => unreachable!("these sizes are those of a Qwen"),
        }
    }

    fn options(packed: bool) -> StepOptions {
        StepOptions { packed, ..StepOptions::default() }
    }

    fn masks(program: &Program) -> Vec<Option<usize>> {
        let masks = program.nodes().iter().filter_map(|node| match node.op {
            Op::AttentionFwd(op) => Some(op.mask.window),
            Op::AttentionBwd(op) => Some(op.mask.window),
            Op::AttentionCached(op) => Some(op.window),
            _ => None,
        });
        masks.collect()
    }

    #[test]
    fn windows_are_those_of_their_layers_and_none_where_everything_fits() {
        let training = |window| training(windowed(window), (2, 7), options(false), Precision::F32).unwrap();
        assert_eq!(masks(&training(3)), [None, Some(3), Some(3), None]);
        assert_eq!(masks(&training(7)), [None; 4]);
        let decoding = |window| masks(&decoding(windowed(window), 2, None, Precision::F32).unwrap());
        assert_eq!(decoding(8), [None, Some(8)]);
        assert_eq!(decoding(9), [None, None]);
        let all = |op: &Op| !matches!(op, Op::AttentionFwd(op) if op.mask != AttentionMask::CAUSAL);
        assert!(training(7).nodes().iter().all(|node| all(&node.op)));
    }

    #[test]
    fn the_last_layer_goes_on_with_the_picked_tokens_only() {
        let step = ServingStep { tokens: 8, sequences: 2, context: None, picks: Some(2) };
        let rows = |step| {
            let program = serving(windowed(9), step, Precision::F32).unwrap();
            let rows = program.nodes().iter().filter_map(|node| match node.op {
                Op::LinearFwd(op) => Some(op.out.shape.rows()),
                _ => None,
            });
            rows.collect::<Vec<_>>()
        };
        // qkv, proj, gate_up and down of two layers, and the head
        assert_eq!(rows(step), [8, 8, 8, 8, 8, 2, 2, 2, 2]);
        assert_eq!(rows(ServingStep { picks: None, ..step }), [8; 9]);
    }

    #[test]
    fn every_gradient_through_a_window_is_the_derivative_of_the_loss() {
        let at = |i: usize| ((i * 7 + 3) % 11) as i32;
        for (packed, positions) in
            [(false, vec![]), (true, vec![0, 1, 2, 3, 0, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0])]
        {
            let program = training(windowed(3), (2, 8), options(packed), Precision::F32).unwrap();
            let check = ProgramGradients {
                program: &program,
                tokens: &(0..16).map(at).collect::<Vec<_>>(),
                targets: &(1..=16).map(at).collect::<Vec<_>>(),
                positions: &positions,
                more: &[],
                seed: 4,
                samples: 12,
                tolerance: 1e-6,
            };
            check_program_gradients(&check).unwrap();
        }
    }
}
