//! Several GPUs: the memory of a rank, and the step that a model of links and limits predicts.

use crate::args::{ShardArg, heading};
use crate::hardware::human_bytes;
use crate::number;
use crate::ranks::pieces_of;
use anyhow::Result;
use clap::Args;
use ironhorse::core::op::Op;
use ironhorse::core::ranks::{Lasting, Links, Turn, turns};
use ironhorse::core::{Limits, Optimizer, Place, Pool, Precision, Program, Section, Shard};
use ironhorse::train::model::{Adapted, After, StepOptions, Sums};
use serde::Serialize;
use std::ops::Range;

/// Several GPUs and machines.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = heading::RANKS)]
pub struct ClusterArgs {
    /// GPUs of a machine, as `train --gpus`: plans one of them, and the time of a step with what they exchange
    #[arg(long, value_name = "N", value_parser = number::count::<usize>)]
    pub gpus: Option<usize>,
    /// Machines with so many GPUs each
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = number::count::<usize>, requires = "gpus")]
    nodes: usize,
    /// What each GPU keeps, as `train --shard` [default: state; none with --optimizer muon]
    #[arg(long, value_enum, requires = "gpus")]
    shard: Option<ShardArg>,
    /// Bytes a second and direction between GPUs of one machine
    #[arg(long, value_name = "SIZE", default_value = "450GB", value_parser = number::bytes, requires = "gpus")]
    nvlink: u64,
    /// Bytes a second and direction of each GPU's network card
    #[arg(long, value_name = "SIZE", default_value = "50GB", value_parser = number::bytes, requires = "gpus")]
    network: u64,
    /// Gradients that are exchanged at a time, as `train --bucket`
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = number::bytes, requires = "gpus")]
    bucket: u64,
    /// Let NCCL add gradients, as `train --fast`: less between machines, but other last bits for other numbers of GPUs
    #[arg(long, requires = "gpus")]
    fast: bool,
    /// Milliseconds of forward and backward of a micro-step, as measured [default: the least by the limits of the device]
    #[arg(long, value_name = "MS", value_parser = number::above_0::<f64>, requires = "gpus")]
    micro_step: Option<f64>,
}

/// What an H200 attains in bf16 (docs/benchmarks): for plans made where there is none.
const H200: Limits = Limits { flops_per_s: 698e12, bytes_per_s: 4.3e12 };

/// What is planned, whoever computes it.
pub struct Workload<'a> {
    pub model: &'a Adapted,
    pub batch: (usize, usize),
    /// Micro-steps of a step of all GPUs.
    pub accumulate: u32,
    pub precision: Precision,
    pub options: StepOptions,
    /// The limits of one GPU, if they were measured.
    pub limits: Option<Limits>,
}

/// The plan of a run on several GPUs.
#[derive(Serialize)]
pub struct Cluster {
    gpus: usize,
    nodes: usize,
    world: usize,
    shard: &'static str,
    micro_steps: u32,
    /// The micro-steps of one rank.
    micro_steps_each: u32,
    /// The rank that needs the most memory.
    pub most: RankMemory,
    /// The rank that needs the least.
    least: RankMemory,
    step: Predicted,
    /// The limits and links that the prediction assumes.
    assumed: Assumed,
}

/// What a rank needs, in bytes.
#[derive(Serialize)]
pub struct RankMemory {
    rank: usize,
    weights: usize,
    /// The gradients of one micro-step.
    gradients: usize,
    /// Sums of gradients between micro-steps: the levels of the tree.
    tree_buffers: usize,
    /// Its part of master weights and moments.
    state: usize,
    /// Activations, with the buffers for what arrives from other ranks.
    activations: usize,
    /// The part of the activations into which the gradients of other ranks arrive, one bucket at a time.
    receive_buffers: usize,
    other: usize,
    pub total: usize,
}

#[derive(Serialize)]
struct Assumed {
    flops_per_s: f64,
    bytes_per_s: f64,
    limits_of: &'static str,
    nvlink_bytes_per_s: f64,
    network_bytes_per_s: f64,
    /// The part of these rates that large messages reach.
    reached: f64,
    call_us: f64,
    message_us: [f64; 2],
    /// How much slower a GPU computes while it exchanges.
    slows: f64,
}

/// A step, in milliseconds of one rank.
#[derive(Default, Serialize)]
struct Predicted {
    forward_backward_ms: f64,
    /// Sums between micro-steps and of what arrived.
    sum_ms: f64,
    exchange_ms: f64,
    gather_ms: f64,
    update_ms: f64,
    /// How much of what is exchanged and gathered goes on while something is computed.
    hidden_ms: f64,
    /// Less than the sum of the above by what is hidden, but for what computing loses to what goes on beside it.
    step_ms: f64,
    /// Bytes of a rank over NVLink and over its network card.
    nvlink_bytes: f64,
    network_bytes: f64,
    /// The same micro-steps on one GPU, with the whole update.
    alone_ms: f64,
    /// alone_ms / step_ms
    weak_scaling: f64,
    tokens_per_s: f64,
}

impl ClusterArgs {
    /// How many GPUs there are.
    pub fn world(&self) -> usize {
        self.gpus.map_or(1, |gpus| gpus.saturating_mul(self.nodes))
    }

    fn shard(&self, optimizer: Optimizer) -> Shard {
        let by_optimizer = if optimizer == Optimizer::Muon { Shard::None } else { Shard::State };
        self.shard.map_or(by_optimizer, Shard::from)
    }

    /// How the micro-steps of one GPU are added up.
    pub fn sums(&self, rank: usize, accumulate: u32, optimizer: Optimizer) -> Sums {
        let place = Place { rank, world: self.world() };
        let machine = if self.fast { 1 } else { self.gpus.unwrap_or(1) };
        let bucket = pieces_of(self.bucket);
        Sums { place, shard: self.shard(optimizer), accumulate, machine, bucket }
    }

    /// Plans the ranks with the most and the least memory, and a step; `None` without `--gpus`.
    pub fn plan(&self, work: &Workload<'_>) -> Result<Option<Cluster>> {
        let Some(gpus) = self.gpus else { return Ok(None) };
        let (world, optimizer) = (self.world(), work.precision.optimizer);
        let elements = work.model.trained_params();
        let sums = |rank: usize| self.sums(rank, work.accumulate, optimizer);
        sums(0).check()?;
        let held = |rank: &usize| sums(*rank).slices().held(elements);
        let most = (0..world).rev().max_by_key(held).unwrap_or(0);
        let least = (0..world).min_by_key(held).unwrap_or(0);
        let program = work.program(Some(sums(most)))?;
        let links = Links {
            inside: self.nvlink as f64,
            outside: self.network as f64,
            adds: self.fast,
            ..Links::h200(gpus)
        };
        let each = work.accumulate / world as u32;
        let clock = Clock { limits: work.limits.unwrap_or(H200), links, micro_step: self.micro_step };
        let step = clock.predict(work, &program, sums(most), world)?;
        Ok(Some(Cluster {
            gpus,
            nodes: self.nodes,
            world,
            shard: sums(0).shard.name(),
            micro_steps: work.accumulate,
            micro_steps_each: each,
            most: RankMemory::new(most, &program),
            least: RankMemory::new(least, &work.program(Some(sums(least)))?),
            step,
            assumed: clock.assumed(work.limits.is_some()),
        }))
    }
}

impl Workload<'_> {
    fn program(&self, sums: Option<Sums>) -> Result<Program> {
        let options = StepOptions { sums, ..self.options };
        Ok(self.model.training(self.batch, options, self.precision)?)
    }
}

impl RankMemory {
    fn new(rank: usize, program: &Program) -> Self {
        let of = |pool| program.layout().bytes(pool);
        let gradients = program.flat(Pool::Grads).bytes();
        let received = program.nodes().iter().filter_map(|node| match &node.op {
            Op::Exchange(op) if op.divided => Some(op.out.bytes()),
            _ => None,
        });
        Self {
            rank,
            weights: of(Pool::Params) + of(Pool::Frozen),
            gradients,
            tree_buffers: of(Pool::Grads).saturating_sub(gradients),
            state: of(Pool::Master) + of(Pool::Moment1) + of(Pool::Moment2),
            activations: of(Pool::Activations),
            receive_buffers: received.max().unwrap_or(0),
            other: of(Pool::Io) + of(Pool::Cache) + of(Pool::Scales),
            total: program.layout().total(),
        }
    }

    /// Its parts with their names; they add up to the total.
    fn parts(&self) -> [(&'static str, usize); 6] {
        [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("tree buffers", self.tree_buffers),
            ("state", self.state),
            ("activations", self.activations),
            ("other", self.other),
        ]
    }
}

/// Ops, and those that run beside them.
#[derive(Clone)]
struct Ops {
    main: Range<usize>,
    beside: Vec<Range<usize>>,
}

/// What tells how long ops take.
struct Clock {
    limits: Limits,
    links: Links,
    /// Milliseconds of forward and backward, if they were measured.
    micro_step: Option<f64>,
}

impl Clock {
    /// Ops, and others beside them, with the time that each takes by itself; what is computed takes `factor` times what the limits
    /// allow. Adds what they move to `step`.
    fn lasting(&self, program: &Program, ops: &Ops, factor: f64, step: &mut Predicted) -> Vec<Lasting> {
        let lasting = |turn: Turn| {
            let op = &program.nodes()[turn.op].op;
            let Some(traffic) = self.links.traffic(op) else {
                let seconds = factor * self.limits.least_seconds(op.flops(), op.bytes());
                return Lasting { turn, seconds, exchanges: false };
            };
            let seconds = self.links.seconds(&traffic);
            step.nvlink_bytes += traffic.inside;
            step.network_bytes += traffic.outside;
            let exchanged = matches!(op, Op::Exchange(_));
            *(if exchanged { &mut step.exchange_ms } else { &mut step.gather_ms }) += 1e3 * seconds;
            Lasting { turn, seconds, exchanges: true }
        };
        turns(program.nodes(), ops.main.clone(), &ops.beside).into_iter().map(lasting).collect()
    }

    /// Runs ops: adds their time to the step, with what they hide. Gives the milliseconds of what is computed.
    fn run(&self, program: &Program, ops: &Ops, factor: f64, step: &mut Predicted) -> f64 {
        let all = self.lasting(program, ops, factor, step);
        let time = self.links.beside(&all);
        step.step_ms += 1e3 * time.seconds;
        step.hidden_ms += 1e3 * time.hidden;
        1e3 * all.iter().filter(|op| !op.exchanges).map(|op| op.seconds).sum::<f64>()
    }

    /// A step of a rank that makes these micro-steps with others or alone.
    fn step(&self, program: &Program, sums: Sums) -> Predicted {
        let mut step = Predicted::default();
        let [micro_step, update] = [program.micro_step(), program.range(Section::Update)]
            .map(|main| Ops { main, beside: Vec::new() });
        let origin = |origin: &String| program.range_at(Section::Sum, origin);
        let mut unused = Predicted::default();
        let least = self.run(program, &micro_step, 1.0, &mut unused);
        let each = self.micro_step.unwrap_or(least);
        let factor = each / least;
        for After { beside, then } in
            sums.after_each(sums.accumulate as usize, program.flat(Pool::Grads).numel())
        {
            let beside = Ops { beside: beside.iter().map(origin).collect(), ..micro_step.clone() };
            step.forward_backward_ms += each;
            step.sum_ms += self.run(program, &beside, factor, &mut step) - each;
            for main in then.iter().map(origin) {
                step.sum_ms += self.run(program, &Ops { main, beside: Vec::new() }, 1.0, &mut step);
            }
        }
        step.update_ms = self.run(program, &update, 1.0, &mut step);
        step
    }

    fn predict(&self, work: &Workload<'_>, program: &Program, sums: Sums, world: usize) -> Result<Predicted> {
        let mut step = self.step(program, sums);
        let each = sums.accumulate / world as u32;
        let own = Sums { place: Place::ALONE, accumulate: each, ..sums };
        step.alone_ms = self.step(&work.program(Some(own))?, own).step_ms;
        step.weak_scaling = step.alone_ms / step.step_ms;
        let tokens = work.batch.0 * work.batch.1 * sums.accumulate as usize;
        step.tokens_per_s = 1e3 * tokens as f64 / step.step_ms;
        Ok(step)
    }

    fn assumed(&self, measured: bool) -> Assumed {
        Assumed {
            flops_per_s: self.limits.flops_per_s,
            bytes_per_s: self.limits.bytes_per_s,
            limits_of: if measured { "this device" } else { "an H200 in bf16" },
            nvlink_bytes_per_s: self.links.inside,
            network_bytes_per_s: self.links.outside,
            reached: self.links.reached,
            call_us: 1e6 * self.links.call,
            message_us: [self.links.message_inside, self.links.message_outside].map(|seconds| 1e6 * seconds),
            slows: self.links.slows,
        }
    }
}

impl Cluster {
    /// The plan as text.
    pub fn lines(&self) -> Vec<String> {
        let Self { gpus, nodes, world, shard, step, assumed, .. } = self;
        let mut lines = vec![format!(
            "{world} GPUs, {gpus} in each of {nodes} machines, --shard {shard}, {} micro-steps of which each makes {}",
            self.micro_steps, self.micro_steps_each
        )];
        let row = |name: &str, most: &str, least: &str| format!("{name:<20} {most:>12} {least:>12}");
        let [most, least] = [&self.most, &self.least].map(|rank| format!("rank {}", rank.rank));
        lines.push(row("memory of", &most, &least));
        let size = |bytes: usize| human_bytes(bytes as u64);
        for ((name, most), (_, least)) in self.most.parts().into_iter().zip(self.least.parts()) {
            lines.push(row(name, &size(most), &size(least)));
        }
        lines.push(row("total", &size(self.most.total), &size(self.least.total)));
        lines.push(format!(
            "{} of the activations are buffers for gradients that arrive from other ranks beside the backward",
            size(self.most.receive_buffers)
        ));
        lines.push(String::new());
        let parts = [
            ("forward, backward", step.forward_backward_ms, String::new()),
            ("sums", step.sum_ms, String::new()),
            ("exchange", step.exchange_ms, String::new()),
            ("gather", step.gather_ms, String::new()),
            ("update", step.update_ms, String::new()),
            (
                "hidden",
                step.hidden_ms,
                format!("  exchanged while computing, which is {:.0} % slower then", 100.0 * assumed.slows),
            ),
            ("step", step.step_ms, format!("  {:.0} tokens/s of all GPUs", step.tokens_per_s)),
        ];
        for (name, ms, note) in parts {
            lines.push(format!("{name:<20} {ms:>9.2} ms{note}"));
        }
        lines.push(format!(
            "weak scaling {:.1} %: one GPU makes its micro-steps and the whole update in {:.2} ms",
            100.0 * step.weak_scaling,
            step.alone_ms
        ));
        lines.push(format!(
            "a rank moves {} over NVLink and {} over its network card; predicted for {}, {:.0} % of {} and {} a second, {:.0} us a call",
            size(step.nvlink_bytes as usize),
            size(step.network_bytes as usize),
            assumed.limits_of,
            100.0 * assumed.reached,
            size(assumed.nvlink_bytes_per_s as usize),
            size(assumed.network_bytes_per_s as usize),
            assumed.call_us
        ));
        lines
    }
}
