use super::*;
use crate::run::RunFolder;
use crate::run::metrics::{Metrics, MetricsWriter};
use crate::session::LayerRouting;
use std::io::Write;

fn step(step: u64) -> Metrics {
    let (loss, ms) = (5.0 - step as f32 / 100.0, 20.0 + step as f32 / 7.0);
    let grad_norm = Some(0.5);
    Metrics {
        step,
        loss,
        lr: 1e-3,
        grad_norm,
        ms,
        data_ms: Some(ms / 50.0),
        tokens: Some(512),
        tokens_per_s: 512e3 / ms,
        ..Metrics::default()
    }
}

/// A folder with a log of these steps.
fn run_of(steps: impl Iterator<Item = u64>) -> (tempfile::TempDir, PathBuf) {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("0001");
    fs::create_dir(&path).unwrap();
    let mut log = MetricsWriter::create(&path.join(METRICS)).unwrap();
    steps.for_each(|i| log.write(&step(i)).unwrap());
    (top, path)
}

#[test]
fn a_log_is_followed_line_by_line() {
    let (_top, path) = run_of(0..3);
    let mut view = RunView::open(&path).unwrap();
    assert_eq!((view.made(), view.name().as_str(), view.setting("steps")), (3, "0001", None));
    assert!(!view.refresh().unwrap(), "nothing is new");
    // half a line is not there yet
    let line = step(3).to_line() + "\n";
    let mut log = fs::File::options().append(true).open(path.join(METRICS)).unwrap();
    log.write_all(&line.as_bytes()[..20]).unwrap();
    view.refresh().unwrap();
    assert_eq!((view.made(), &view.unreadable), (3, &None));
    log.write_all(&line.as_bytes()[20..]).unwrap();
    assert!(view.refresh().unwrap());
    assert_eq!((view.made(), view.table.loss[3]), (4, step(3).loss));
    assert_eq!(view.table, RunView::open(&path).unwrap().table);
}

#[test]
fn a_log_that_is_cut_back_is_read_again() {
    let (_top, path) = run_of(0..50);
    let mut view = RunView::open(&path).unwrap();
    // a resume at step 10, which then gets further than the log was
    let (mut log, _) = MetricsWriter::resume(&path.join(METRICS), 10).unwrap();
    view.refresh().unwrap();
    assert_eq!(view.made(), 10);
    (10..80).for_each(|i| log.write(&Metrics { loss: 7.0, ..step(i) }).unwrap());
    view.refresh().unwrap();
    assert_eq!((view.made(), view.table.loss[9], view.table.loss[10]), (80, step(9).loss, 7.0));
    // the same without a look between: the file is longer than what was read
    let (mut log, _) = MetricsWriter::resume(&path.join(METRICS), 10).unwrap();
    (10..200).for_each(|i| log.write(&Metrics { loss: 8.0, ..step(i) }).unwrap());
    assert!(view.refresh().unwrap());
    assert_eq!((view.made(), view.table.steps.len(), view.table.loss[10]), (200, 200, 8.0));
    // the last line gets what ended the run
    let ended = crate::run::metrics::Ended {
        by: crate::run::metrics::EndedBy::Patience,
        val_loss: 3.5,
        best: crate::format::checkpoint::Best { step: 5, val_loss: 3.0 },
    };
    log.amend_last(&Metrics { ended: Some(ended), ..step(199) }).unwrap();
    view.refresh().unwrap();
    assert_eq!((view.made(), view.table.val.last(), view.is_complete()), (200, Some(&(200, 3.5)), true));
    fs::remove_file(path.join(METRICS)).unwrap();
    assert!(view.refresh().unwrap());
    assert_eq!(view.made(), 0);
}

#[test]
fn steps_that_go_back_replace_those_that_were_there() {
    let (_top, path) = run_of((0..6).chain(3..5));
    let view = RunView::open(&path).unwrap();
    assert_eq!(view.table.steps, [0, 1, 2, 3, 4]);
    assert_eq!(view.table.loss.len(), 5);
}

#[test]
fn numbers_that_are_not_finite_and_lines_that_are_not_json() {
    let (_top, path) = run_of(0..2);
    let mut log = fs::File::options().append(true).open(path.join(METRICS)).unwrap();
    let nan = Metrics { loss: f32::NAN, grad_norm: Some(f32::INFINITY), bad: true, ..step(2) };
    writeln!(log, "{}\nnonsense\n\n{{\"step\":", nan.to_line()).unwrap();
    let routing = LayerRouting { load: vec![0.5, 0.25, 0.25, 1.0], entropy: 1.0, aux: 0.1 };
    let more = Metrics { val_loss: Some(2.5), router: vec![routing.clone()], ..step(3) };
    writeln!(log, "{}", more.to_line()).unwrap();
    let view = RunView::open(&path).unwrap();
    assert_eq!((view.table.steps.len(), &view.table.bad[..]), (4, &[2][..]));
    assert_eq!(view.table.points(Quantity::Loss).len(), 3, "NaN is not drawn");
    assert!(view.table.grad_norm[2].is_nan());
    let (count, text) = view.unreadable.unwrap();
    assert!(count == 2 && text.starts_with("line 4 is not one JSON object"), "{count}: {text}");
    assert_eq!((view.table.best(), view.table.last(Quantity::Busiest)), (Some((3, 2.5)), Some(2.0)));
    assert_eq!(view.table.router, [routing]);
}

#[test]
fn a_run_folder_says_who_it_is_and_how_long_it_takes() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("run");
    let mut folder = RunFolder::create(&path, "steps = 300\nbatch = 4\n", false).unwrap();
    let data_ms = |i| (i >= 50).then_some(5.0); // logs of earlier versions do not say
    (0..200).for_each(|i| folder.log(&Metrics { ms: 50.0, data_ms: data_ms(i), ..step(i) }).unwrap());
    folder.sample(100, "Ivy was").unwrap();
    let mut view = RunView::open(&path).unwrap();
    assert_eq!((view.setting("steps"), view.made(), view.eta()), (Some(300), 200, Some(5.0)));
    assert_eq!(view.sample(0), Some((100, "Ivy was".to_owned())));
    assert!(view.sample(1).is_none() && !view.is_complete());
    assert_eq!((view.table.seconds(), view.table.all_tokens()), (10.0, 200.0 * 512.0));
    assert_eq!((view.table.data_share(100), view.table.data_share(usize::MAX)), (Some(0.1), Some(0.1)));
    assert_eq!(Table::default().data_share(100), None);
    if cfg!(target_os = "linux") {
        assert_eq!(view.life, Life::Process(std::process::id()));
        drop(folder);
        assert!(view.refresh().unwrap());
        assert_eq!(view.life, Life::Nobody);
    }
    let text = RunView::open(top.path()).unwrap_err().to_string();
    assert!(text.contains("a folder without metrics.jsonl") && text.contains("runs/0001"), "{text}");
}

#[test]
fn a_long_log_is_read_by_pieces_as_by_one() {
    let (_top, path) = run_of(0..60_000);
    let mut log = fs::read(path.join(METRICS)).unwrap();
    assert!(log.len() > 4 << 20, "long enough for several threads: {}", log.len());
    log.splice(log.len() - 200.., *b"\nbad\n");
    fs::write(path.join(METRICS), &log).unwrap();
    let view = RunView::open(&path).unwrap();
    let whole = view.table.steps.len() as u64;
    assert!(view.table.steps.iter().copied().eq(0..whole), "every step once, in order");
    assert!((59_990..60_000).contains(&whole));
    let lines = log.iter().filter(|&&byte| byte == b'\n').count();
    let (count, text) = view.unreadable.unwrap();
    assert!(count == 2 && text.starts_with(&format!("line {} is", lines - 1)), "{text} of {lines}");
}
