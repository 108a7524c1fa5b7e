//! Runs the stages of `cargo xtask test` in two lanes, so that all cores are busy: one after the other, with their output as
//! it comes; and beside them those that are one program, with their output when each has ended.

use crate::counts::Counts;
use crate::out;
use crate::process::{captured, shown};
use crate::repo::Repo;
use crate::report::{self, Done, seconds};
use crate::stages::{Depth, Stage, command, run_work};
use anyhow::Result;
use std::sync::{Condvar, Mutex, PoisonError, mpsc};
use std::time::Instant;

/// Runs the stages until one fails.
pub fn run_stages(repo: &Repo, stages: &[Stage], depth: Depth) -> Vec<Done> {
    let live = |stage: &Stage, place: String| {
        out::bytes(format!("\n==> {place} {}: ", stage.name).as_bytes());
        run_live(stage, || run_work(repo, stage.work, depth))
    };
    lanes(stages, live, |stage| run_kept(repo, stage, depth), out::line)
}

/// A stage that ran beside others, and what it printed.
type Kept = (Done, String);

/// This thread runs the stages of the first lane, another those beside them. A stage starts when what it needs has ended,
/// and none starts after a failure.
fn lanes(
    stages: &[Stage],
    live: impl Fn(&Stage, String) -> Done,
    kept: impl Fn(&Stage) -> Kept + Send,
    print: impl Fn(String),
) -> Vec<Done> {
    let (mut beside, mut in_order): (Vec<Stage>, Vec<Stage>) = stages.iter().partition(|stage| stage.beside);
    if in_order.is_empty() {
        std::mem::swap(&mut beside, &mut in_order);
    }
    let progress = &Progress::new(stages);
    std::thread::scope(|scope| {
        let (ended, besides) = mpsc::channel();
        scope.spawn(move || {
            for stage in beside {
                if !progress.may_start(&stage) {
                    return;
                }
                let one = kept(&stage);
                progress.end(&one.0);
                let _ = ended.send(one);
            }
        });
        let show = |(done, text): Kept| {
            print(format!("\n==> {}, beside the others: {text}{}", done.name, ends(&done)));
            done
        };
        let mut done: Vec<Done> = Vec::new();
        for (i, stage) in in_order.iter().enumerate() {
            let may_start = progress.may_start(stage);
            done.extend(besides.try_iter().map(show));
            if !may_start {
                break;
            }
            let one = live(stage, format!("{}/{}", i + 1, in_order.len()));
            progress.end(&one);
            done.push(one);
        }
        done.extend(besides.iter().map(show));
        done
    })
}

/// Which of the chosen stages have not ended, and whether one has failed.
struct Progress {
    state: Mutex<(Vec<&'static str>, bool)>,
    changed: Condvar,
}

impl Progress {
    fn new(stages: &[Stage]) -> Self {
        let open = stages.iter().map(|stage| stage.name).collect();
        Self { state: Mutex::new((open, false)), changed: Condvar::new() }
    }

    fn end(&self, done: &Done) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0.retain(|&name| name != done.name);
        state.1 |= !done.passed;
        self.changed.notify_all();
    }

    /// Waits until what the stage needs has ended; false if any stage has failed.
    fn may_start(&self, stage: &Stage) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |(open, failed): &mut (Vec<&'static str>, bool)| {
            !*failed && stage.needs.iter().any(|name| open.contains(name))
        };
        !self.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner).1
    }
}

/// `<== fmt passed in 1.5 s`
fn ends(done: &Done) -> String {
    let verdict = if done.passed { "passed" } else { "FAILED" };
    format!("<== {} {verdict} in {}", done.name, seconds(done.time))
}

/// A stage that failed without counting a test counts as one failure: it did not compile, or crashed.
fn at_least_one_failure(passed: bool, mut counts: Counts) -> Counts {
    counts.failed = counts.failed.max(usize::from(!passed));
    counts
}

fn run_kept(repo: &Repo, stage: &Stage, depth: Depth) -> Kept {
    let start = Instant::now();
    let mut counts = Counts::default();
    let ran = command(repo, stage.work, depth).and_then(|(mut program, dialect)| {
        let (passed, text) = captured(&mut program)?;
        text.lines().for_each(|line| dialect.read(line, &mut counts));
        Ok((passed, format!("{}\n{text}", shown(&program))))
    });
    let (passed, text) = ran.unwrap_or_else(|error| (false, format!("error: {error:#}\n")));
    let counts = at_least_one_failure(passed, counts);
    (Done { name: stage.name, passed, time: start.elapsed(), cpu: None, beside: true, counts }, text)
}

fn run_live(stage: &Stage, work: impl FnOnce() -> Result<(bool, Counts)>) -> Done {
    let (start, cpu) = (Instant::now(), report::children_cpu());
    let (passed, counts) = work().unwrap_or_else(|error| {
        out::line(format!("error: {error:#}"));
        (false, Counts::default())
    });
    let cpu = report::children_cpu().zip(cpu).map(|(after, before)| after.saturating_sub(before));
    let counts = at_least_one_failure(passed, counts);
    let done = Done { name: stage.name, passed, time: start.elapsed(), cpu, beside: false, counts };
    out::line(ends(&done));
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stages::STAGES;
    use std::time::Duration;

    fn done(stage: &Stage, passed: bool) -> Done {
        let counts = at_least_one_failure(passed, Counts::default());
        Done { name: stage.name, passed, time: Duration::ZERO, cpu: None, beside: stage.beside, counts }
    }

    /// The stages in the order in which they ended, when these fail.
    fn ended(stages: &[Stage], fail: &[&str]) -> Vec<&'static str> {
        let order = Mutex::new(Vec::new());
        let run = |stage: &Stage| {
            let one = done(stage, !fail.contains(&stage.name));
            order.lock().unwrap().push(stage.name);
            one
        };
        let all = lanes(stages, |stage, _| run(stage), |stage| (run(stage), String::new()), |_| ());
        let order = order.into_inner().unwrap();
        assert_eq!(all.len(), order.len(), "every stage that ran is reported");
        order
    }

    #[test]
    fn stages_start_after_what_they_need() {
        for _ in 0..20 {
            let order = ended(&STAGES, &[]);
            assert_eq!(order.len(), STAGES.len());
            let place = |name: &str| order.iter().position(|&one| one == name).unwrap();
            for stage in &STAGES {
                assert!(stage.needs.iter().all(|need| place(need) < place(stage.name)), "{order:?}");
            }
        }
    }

    #[test]
    fn nothing_starts_after_a_failure() {
        let order = ended(&STAGES, &["build"]);
        for name in ["test", "doctest", "torture", "wheel", "pytest"] {
            assert!(!order.contains(&name), "{order:?}");
        }
        let order = ended(&STAGES, &["setup"]);
        assert!(["wheel", "pytest", "mypy", "kernels"].iter().all(|name| !order.contains(name)), "{order:?}");
    }

    #[test]
    fn what_a_stage_needs_may_be_left_out() {
        let only: Vec<Stage> =
            STAGES.iter().filter(|stage| ["doctest", "pytest"].contains(&stage.name)).copied().collect();
        let mut order = ended(&only, &[]);
        order.sort_unstable();
        assert_eq!(order, ["doctest", "pytest"]);
        assert_eq!(ended(&only[..1], &[]), ["doctest"], "alone it is not beside anything");
    }
}
