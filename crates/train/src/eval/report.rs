//! Results in the form of lm-evaluation-harness, so that the tools that read its files read ours.

use serde_json::{Map, Value, json};

/// One figure of a task with its standard error, which is `None` where there is none.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// `acc`, `acc_norm`, `loss`, ...
    pub name: &'static str,
    /// The figure.
    pub value: f64,
    /// Its standard error.
    pub error: Option<f64>,
    /// Whether a higher figure is a better one.
    pub higher_is_better: bool,
}

/// The figures of one task.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskResult {
    /// Its name.
    pub name: String,
    /// How the prompt was made and what was counted, in words.
    pub definition: String,
    /// The figures.
    pub metrics: Vec<Metric>,
    /// Samples scored.
    pub samples: usize,
    /// Samples whose beginning did not fit into the model's context.
    pub cut: usize,
    /// Seconds it took.
    pub seconds: f64,
}

/// The results of all tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalReport {
    /// The model's file or folder.
    pub model: String,
    /// Device and element type, in words.
    pub device: String,
    /// The tasks.
    pub tasks: Vec<TaskResult>,
}

/// The version of our definitions of tasks.
const VERSION: u32 = 1;

impl EvalReport {
    /// The report as lm-evaluation-harness writes its own: `results`, `n-shot`, `n-samples`, `versions`, `config`.
    pub fn json(&self) -> Value {
        let per_task = |of: &dyn Fn(&TaskResult) -> Value| -> Value {
            self.tasks.iter().map(|task| (task.name.clone(), of(task))).collect::<Map<_, _>>().into()
        };
        json!({
            "results": per_task(&TaskResult::figures),
            "n-shot": per_task(&|_| json!(0)),
            "higher_is_better": per_task(&|task| {
                task.metrics.iter().map(|m| (m.name.to_owned(), json!(m.higher_is_better))).collect::<Map<_, _>>().into()
            }),
            "n-samples": per_task(&|task| json!({"original": task.samples, "effective": task.samples})),
            "versions": per_task(&|_| json!(VERSION)),
            "configs": per_task(&|task| json!({"task": task.name, "description": task.definition})),
            "config": {"model": "ironhorse", "model_args": {"pretrained": self.model}, "device": self.device},
            "total_evaluation_time_seconds": self.tasks.iter().map(|task| task.seconds).sum::<f64>().to_string(),
        })
    }
}

impl TaskResult {
    fn figures(&self) -> Value {
        let mut figures = Map::new();
        figures.insert("alias".into(), json!(self.name));
        for Metric { name, value, error, .. } in &self.metrics {
            figures.insert(format!("{name},none"), json!(value));
            let error =
                error.filter(|error| error.is_finite()).map_or_else(|| json!("N/A"), |error| json!(error));
            figures.insert(format!("{name}_stderr,none"), error);
        }
        figures.insert("cut,none".into(), json!(self.cut));
        figures.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_the_harness_s() {
        let metric = |name, error| Metric { name, value: 0.25, error, higher_is_better: true };
        let task = TaskResult {
            name: "hellaswag".into(),
            definition: "as llm.c".into(),
            metrics: vec![metric("acc", Some(0.5)), metric("x", Some(f64::NAN))],
            samples: 3,
            cut: 0,
            seconds: 1.5,
        };
        let report = EvalReport { model: "m".into(), device: "cpu f32".into(), tasks: vec![task] }.json();
        let results = &report["results"]["hellaswag"];
        assert_eq!(results["acc,none"], 0.25);
        assert_eq!(results["acc_stderr,none"], 0.5);
        assert_eq!(results["x_stderr,none"], "N/A");
        assert_eq!(report["n-samples"]["hellaswag"]["effective"], 3);
        assert_eq!(report["n-shot"]["hellaswag"], 0);
    }
}
