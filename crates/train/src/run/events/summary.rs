//! What TensorBoard shows of a step, and under which tags.

use super::wire::Message;
use super::{TENSOR, VALUE};
use crate::run::metrics::{Ended, Metrics};
use crate::session::LayerRouting;

// Fields of Value.
const TAG: u32 = 1;
const SIMPLE_VALUE: u32 = 2;
const HISTO: u32 = 5;
const METADATA: u32 = 9;
/// The type of a tensor of texts.
const DT_STRING: u64 = 7;
const STRING_VAL: u32 = 8;
/// Readings of the experts' loads between two that are written as histograms: they are long.
const HISTOGRAM_EVERY: u64 = 10;

pub const VALIDATION: &str = "loss/validation";

/// The numbers of a step.
pub fn of_step(metrics: &Metrics) -> Message {
    let numbers = [
        ("loss/training", Some(metrics.loss)),
        (VALIDATION, metrics.val_loss),
        ("learning_rate", Some(metrics.lr)),
        ("gradient_norm", metrics.grad_norm),
        ("speed/tokens_per_s", Some(metrics.tokens_per_s)),
        ("speed/step_ms", Some(metrics.ms)),
        ("speed/data_ms", metrics.data_ms),
        ("rewards/chosen", metrics.rewards_chosen),
        ("rewards/rejected", metrics.rewards_rejected),
        ("rewards/accuracy", metrics.reward_accuracy),
        ("rewards/validation_accuracy", metrics.val_reward_accuracy),
        ("outliers/spike", metrics.spike),
        ("outliers/bad", metrics.bad.then_some(1.0)),
    ];
    let mut summary = Message::default();
    for (tag, number) in numbers {
        if let Some(number) = number {
            summary = summary.bytes(VALUE, scalar(tag, number));
        }
    }
    for (task, accuracies) in &metrics.eval {
        for figure in accuracies.metrics() {
            let tag = format!("eval/{task}/{}", figure.name);
            summary = summary.bytes(VALUE, scalar(&tag, figure.value as f32));
        }
    }
    for (l, layer) in metrics.router.iter().enumerate() {
        summary = experts(summary, l, layer, metrics.step.is_multiple_of(HISTOGRAM_EVERY));
    }
    summary
}

/// The validation that ended a run.
pub fn of_end(ended: &Ended) -> Message {
    Message::default().bytes(VALUE, scalar(VALIDATION, ended.val_loss))
}

fn scalar(tag: &str, number: f32) -> Message {
    Message::default().bytes(TAG, tag).float(SIMPLE_VALUE, number)
}

/// How a layer spreads its tokens: the busiest expert in multiples of an even share, how undecided the router is, the auxiliary
/// loss, and the share of each expert as a histogram whose bucket e is expert e.
fn experts(summary: Message, l: usize, layer: &LayerRouting, histogram: bool) -> Message {
    let tag = |name: &str| format!("experts/layer_{l:02}/{name}");
    let mut summary = summary
        .bytes(VALUE, scalar(&tag("busiest"), layer.busiest()))
        .bytes(VALUE, scalar(&tag("entropy"), layer.entropy))
        .bytes(VALUE, scalar(&tag("auxiliary_loss"), layer.aux));
    if histogram && !layer.load.is_empty() {
        let shares = || layer.load.iter().map(|&load| f64::from(load));
        let weighted =
            |power: i32| shares().enumerate().map(move |(e, share)| share * (e as f64).powi(power));
        let histo = Message::default()
            .double(1, -0.5) // the smallest value, the largest, their number, sum, sum of squares
            .double(2, layer.load.len() as f64 - 0.5)
            .double(3, shares().sum())
            .double(4, weighted(1).sum())
            .double(5, weighted(2).sum())
            .doubles(6, (0..layer.load.len()).map(|e| e as f64 + 0.5)) // upper ends
            .doubles(7, shares());
        summary = summary.bytes(VALUE, Message::default().bytes(TAG, tag("load")).bytes(HISTO, histo));
    }
    summary
}

/// A sample as text. TensorBoard takes it for Markdown: indented it is shown as it is.
pub fn of_sample(text: &str) -> Message {
    let lines = text.strip_suffix('\n').unwrap_or(text).split('\n');
    let indented: String = lines.map(|line| format!("    {line}\n")).collect();
    let plugin = Message::default().bytes(1, "text");
    let metadata = Message::default().bytes(1, plugin).number(4, 2); // plugin_data; a class of data: tensors
    let shape = Message::default().bytes(2, Message::default().number(1, 1)); // one text
    let tensor = Message::default().number(1, DT_STRING).bytes(2, shape).bytes(STRING_VAL, indented);
    let value = Message::default().bytes(TAG, "samples").bytes(TENSOR, tensor).bytes(METADATA, metadata);
    Message::default().bytes(VALUE, value)
}
