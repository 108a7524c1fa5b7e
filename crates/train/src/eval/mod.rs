//! Evaluation: how well a model predicts texts, and how often it prefers the right one of several answers.
//!
//! ```text
//! scorer.rs   losses of texts of any length, batched by length      choices.rs   multiple choice: examples, accuracies
//! stream.rs   loss, perplexity and bits per byte of a data set      jsonl.rs     multiple choice from JSON lines
//! report.rs   the results as lm-evaluation-harness writes them      task.rs      a file of questions under a name
//! ```

mod choices;
mod jsonl;
mod report;
mod scorer;
mod stream;
mod task;

pub use choices::{Accuracies, Grade, mean_and_error, multiple_choice};
pub use jsonl::{Encode, PromptForm, read_jsonl, read_questions};
pub use report::{EvalReport, Metric, TaskResult};
pub use scorer::{Score, Scorer, Text, shapes};
pub use stream::{StreamLoss, stream_loss};
pub use task::{Task, TaskFile};
