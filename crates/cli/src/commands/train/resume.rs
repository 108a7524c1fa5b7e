//! `ironhorse train --resume`: the settings are those of the run's own config.toml; what may differ is decided key by key.

use super::super::model::{RUNS, open_tokenizer};
use super::{Earlier, Party, Prepared, TrainArgs, Trained, Watch, checks, defaults, report, settings_of};
use crate::out;
use anyhow::{Context, Result, bail};
use ironhorse::train::format::checkpoint::{
    Checkpoint, CheckpointAdapter, is_run, newest_run, open_latest, step_name,
};
use ironhorse::train::format::open_weights;
use ironhorse::train::run::metrics::{Ended, Metrics, read_metrics};
use ironhorse::train::run::schedule::Decay;
use ironhorse::train::run::{InitFacts, RunFolder, RunJson, read_algorithms, restore_position};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What a setting that differs from the run's does to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// The weights stay equal to those of the uninterrupted run, bit for bit.
    Harmless,
    /// The run continues differently from the uninterrupted one; the user is told.
    Said,
    /// The same as a run that had the new setting from its start: the steps made so far do not depend on it.
    AsFromTheStart,
    /// The data may be elsewhere, but must be the same tokens, which is checked.
    SameTokens,
}

/// The keys of config.toml that may change. Any other is a different run.
const MAY_CHANGE: [(Change, &str); 3] = [
    (
        Change::Harmless,
        "save-every save-minutes keep save-sync threads val-every val-batches sample-every sample-tokens prompt \
         tokenizer temperature top-k top-p greedy bad-steps patience eval eval-every eval-limit shard bucket rank-timeout",
    ),
    (Change::SameTokens, "data val-data"),
    (
        Change::Said,
        "steps lr warmup schedule final-fraction decay-fraction weight-decay grad-clip device dtype master moments fast attention \
         no-graphs recompute head-chunks",
    ),
];

/// Resumes a run. `None` if there is nothing left to do, which is printed.
pub fn run(
    named: &Path,
    given: &TrainArgs,
    line: &[OsString],
    watch: &mut Watch<'_>,
) -> Result<Option<Trained>> {
    let path = find(named)?;
    out::check_json_in(given.json.as_deref(), None)?;
    let Settings { own, mut args, mut changes } = settings(&path, given, line)?;
    defaults::shorten_warmup(&mut args);
    let party = watch.party;
    party.settle(&mut args)?;
    let mut folder = party.folder(&path, || Ok(RunFolder::open(&path)?))?;
    let Some(mut checkpoint) = latest(&path, party)? else {
        bail!(
            "{}: no valid checkpoint to resume from; start again with: ironhorse train --config {} --out NEW",
            path.display(),
            path.join("config.toml").display()
        );
    };
    let state = checkpoint.trainer().clone();
    let steps = args.steps.unwrap_or(0);
    if state.step > steps {
        bail!("--steps is {steps}, but {} has made {} steps already", path.display(), state.step);
    }
    if state.step == steps && is_complete(&path, &args, checkpoint.config().vocab_size())? {
        out::line(format!(
            "{}: all {steps} steps are done; give a larger --steps to continue",
            path.display()
        ))?;
        return Ok(None);
    }
    if let Some(ended) = ended_by_patience(&path, &args, state.step)? {
        out::line(ended)?;
        return Ok(None);
    }
    judge_decay(&own, &args, state.step, &mut changes)?;
    let algorithms = read_algorithms(&path)?;
    let mut with_copy = args.clone();
    if args.tokenizer.as_deref().is_some_and(|name| !name.exists() && open_tokenizer(name).is_err())
        && given.tokenizer.is_none()
        && !checkpoint.tokenizer_files()?.is_empty()
    {
        with_copy.tokenizer = Some(checkpoint.path().to_owned()); // the original is gone
    }
    let mut prepared = Prepared::new(
        &with_copy,
        *checkpoint.config(),
        watch,
        Earlier { choices: &algorithms, ..Earlier::default() },
    )?;
    checks::space(&path, &args, &checkpoint.model(), prepared.spec.precision)?;
    prepared.model = checkpoint.text_tokens();
    load_base(&mut prepared, &checkpoint)?;
    if args.dpo {
        load_start(&mut prepared, &args, &path)?;
        prepared.measure_reference()?;
    }
    let exact = prepared.session.restore(&mut checkpoint)?;
    restore_position(&state, &mut prepared.data)
        .with_context(|| format!("{}: cannot restore the position in the data", path.display()))?;
    let mut state = state;
    state.settings = args.of_checkpoint()?;

    prepared.agree(party)?;
    if !party.leads() {
        return prepared.train(&args, folder, state, watch).map(Some);
    }
    let mut json = RunJson::read(&path)?
        .unwrap_or_else(|| RunJson::new(report::started(line, &mut prepared.session, 0)));
    let mut started = report::started(line, &mut prepared.session, state.step);
    say_changes(&changes, &json, &started.device, exact);
    started.changes = changes.iter().map(|(_, text)| text.clone()).collect();
    json.resumes.push(started);
    json.write(&path)?;
    if !changes.is_empty() {
        folder.set_config(&toml::to_string_pretty(&args).context("the settings are not TOML")?)?;
    }
    folder.cut_back(state.step)?;
    prepared.train(&args, folder, state, watch).map(Some)
}

/// The newest checkpoint that is whole: for all processes the one that the leader finds.
fn latest(path: &Path, party: &Party) -> Result<Option<Checkpoint>> {
    let damaged =
        |error: &ironhorse::train::Error| out::note(format_args!("skipped a damaged checkpoint: {error}"));
    let found = if party.leads() { open_latest(path, Checkpoint::open, damaged)? } else { None };
    if party.place().is_alone() {
        return Ok(found);
    }
    let own = found.as_ref().map_or_else(String::new, |found| found.path().to_string_lossy().into_owned());
    let place = party.of_leader(&own)?;
    match found {
        None if !place.is_empty() => Ok(Some(Checkpoint::open_compared(Path::new(&place))?)),
        found => Ok(found),
    }
}

/// Loads the frozen base of a run with adapters, which must be the one it began with.
fn load_base(prepared: &mut Prepared, checkpoint: &Checkpoint) -> Result<()> {
    let Some(CheckpointAdapter { base, digest, .. }) = checkpoint.adapter() else { return Ok(()) };
    let mut source = open_weights(base).with_context(|| {
        format!("{}: the base of its adapters cannot be read", checkpoint.path().display())
    })?;
    if !source.config().computes_as(checkpoint.config()) {
        bail!(
            "{}: has other sizes than the base of the adapters in {}",
            base.display(),
            checkpoint.path().display()
        );
    }
    let found = prepared.session.load_base(base, |name, values| source.read_tensor(name, values))?.text();
    if found != *digest {
        bail!(
            "{}: has digest {found}, expected {digest}, the base of the adapters in {}: it is another model now",
            base.display(),
            checkpoint.path().display()
        );
    }
    Ok(())
}

/// Loads what a run that learns preferences began with, to which rewards are relative: the weights of `--init`, which must be
/// the same, or random ones; adapters begin at 0.
fn load_start(prepared: &mut Prepared, args: &TrainArgs, run: &Path) -> Result<()> {
    let Some(init) = args.init.as_deref().filter(|_| args.adapters.lora.is_none()) else {
        return Ok(prepared.session.init(args.seed)?);
    };
    let known = RunJson::read(run)?.and_then(|json| json.init).map(|init| init.sha256);
    let mut source = open_weights(init)
        .with_context(|| format!("{}: the weights it began with cannot be read", run.display()))?;
    let found = InitFacts::of(source.path())?.sha256;
    if let Some(known) = known.filter(|known| *known != found) {
        bail!(
            "{}: has SHA-256 {found}, expected {known}, the weights that {} began with: its rewards are relative to them",
            init.display(),
            run.display()
        );
    }
    prepared.session.load_base(init, |name, values| source.read_tensor(name, values))?;
    Ok(())
}

/// The run that is meant: the one named, or the newest.
fn find(named: &Path) -> Result<PathBuf> {
    if named.as_os_str().is_empty() {
        return newest_run(Path::new(RUNS)).context(
            "no run below runs/ has a checkpoint to resume from; name one with --resume RUN, or start one with `ironhorse train`",
        );
    }
    // a checkpoint inside a run means the run
    let inside = named.ancestors().skip(1).take(2).find(|folder| is_run(folder));
    match (is_run(named), inside) {
        (true, _) => Ok(named.to_owned()),
        (false, Some(run)) => {
            bail!("{}: is inside a run; resume the run with --resume {}", named.display(), run.display())
        }
        (false, None) if !named.exists() => bail!("{}: no such run", named.display()),
        (false, None) => bail!("{}: is not a run: it has no config.toml and metrics.jsonl", named.display()),
    }
}

/// The settings of a resumed run.
struct Settings {
    /// The settings it had.
    own: TrainArgs,
    /// The settings it has now.
    args: TrainArgs,
    /// How they differ.
    changes: Vec<(Change, String)>,
}

/// The settings of the run with what the line changes, and those changes; a change that would make another run of it is
/// refused.
fn settings(path: &Path, given: &TrainArgs, line: &[OsString]) -> Result<Settings> {
    let config = path.join("config.toml");
    if line.iter().any(|arg| arg.to_string_lossy().starts_with("--config")) {
        bail!("--config cannot be used with --resume: the run's settings are in {}", config.display());
    }
    let own = crate::parse_train(&["ironhorse".into(), "train".into()], &config)?;
    let mut args = crate::parse_train(line, &config)?;
    // of this start only, whatever an earlier version has kept
    (args.json, args.resume, args.max_time) = (given.json.clone(), None, given.max_time);
    let (before, now) = (toml::Table::try_from(&own)?, toml::Table::try_from(&args)?);
    let mut keys: Vec<&String> = before.keys().chain(now.keys()).collect();
    keys.sort();
    keys.dedup();
    let mut changes = Vec::new();
    for key in keys.into_iter().filter(|key| before.get(*key) != now.get(*key)) {
        let text = |table: &toml::Table| table.get(key).map_or_else(|| "not set".into(), ToString::to_string);
        let text = format!("{key}: {} → {}", text(&before), text(&now));
        match MAY_CHANGE.iter().find(|(_, keys)| keys.split(' ').any(|may| may == key)) {
            Some((change, _)) => changes.push((*change, text)),
            None => bail!(
                "--{key} cannot change when a run is resumed ({text}); leave it out, or start a new run from these weights with \
                 --init {}",
                path.display()
            ),
        }
    }
    Ok(Settings { own, args, changes })
}

/// Looks at a change of the number of steps or of the decay. As long as the run has made no step of a decay, neither of the old
/// one nor of the new one, it is the same as a run that had the new numbers from its start. A decay of wsd that has begun is not
/// taken back, and one that should have begun already is not entered half-way: the rate would jump.
fn judge_decay(own: &TrainArgs, args: &TrainArgs, made: u64, changes: &mut [(Change, String)]) -> Result<()> {
    let is_decay = |text: &str| ["steps: ", "decay-fraction: "].iter().any(|key| text.starts_with(key));
    if !changes.iter().any(|(_, text)| is_decay(text)) {
        return Ok(());
    }
    let (before, now) = (settings_of(own)?.schedule, settings_of(args)?.schedule);
    if before.agrees(&now, made) {
        // a run that made its last step has validated after it, which the longer run does not
        for (change, _) in changes.iter_mut().filter(|(_, text)| is_decay(text) && made < before.total_steps)
        {
            *change = Change::AsFromTheStart;
        }
        return Ok(());
    }
    if before.kind != Decay::Wsd || now.kind != Decay::Wsd {
        return Ok(());
    }
    let (old, new) = (before.stable_steps(), now.stable_steps());
    if made > old {
        bail!(
            "--steps and --decay-fraction cannot change any longer: the decay of --schedule wsd began at step {old}, and the run \
             has made {made}; leave them out, or start a new run from these weights with --init"
        );
    }
    bail!(
        "--steps {} with --decay-fraction {} begins its decay at step {new}, but the run has made {made} steps at the full rate; \
         give more --steps or a smaller --decay-fraction",
        now.total_steps,
        now.decay_fraction
    );
}

/// What to say about a run that ended because its patience was over, and still is.
fn ended_by_patience(path: &Path, args: &TrainArgs, made: u64) -> Result<Option<String>> {
    let log = read_metrics(&path.join("metrics.jsonl"))?;
    let last = log.last().filter(|last| last.step + 1 == made);
    let Some(Ended { val_loss, best, .. }) = last.and_then(|last| last.ended) else { return Ok(None) };
    let after = log.iter().filter(|line| line.step > best.step && line.val_loss.is_some()).count() as u64 + 1;
    if args.patience == 0 || after < args.patience {
        return Ok(None);
    }
    Ok(Some(format!(
        "{}: ended after {made} steps, because {after} validations brought no loss below {} of step {} (the last {val_loss}); give \
         a larger --patience to continue",
        path.display(),
        best.val_loss,
        best.step
    )))
}

/// Whether a run whose steps are done has its last validation, its last grades and its last sample too.
fn is_complete(path: &Path, args: &TrainArgs, vocab: usize) -> Result<bool> {
    let log = read_metrics(&path.join("metrics.jsonl"))?;
    let validates = args.val_batches > 0
        && (args.data.is_empty() || !args.val_data.is_empty() || args.val_fraction > Some(0.0));
    let last = log.last().filter(|last| Some(last.step + 1) == args.steps);
    // as data.rs decides whether there is a tokenizer
    let has_tokenizer = args.tokenizer.is_some() || args.data.is_empty() || vocab == 256;
    let samples = args.sample_tokens != Some(0) && has_tokenizer;
    let sampled = path.join("samples").join(format!("{}.txt", step_name(args.steps.unwrap_or(0)))).exists();
    let measured = |last: &Metrics| {
        let graded = args.eval.iter().all(|task| last.eval.contains_key(&task.name));
        last.bad || (graded && (!validates || last.val_loss.is_some()))
    };
    Ok((sampled || !samples) && last.is_some_and(measured))
}

/// Reports what has changed.
fn say_changes(changes: &[(Change, String)], json: &RunJson, device: &str, exact: bool) {
    for (change, text) in changes {
        let what = match change {
            Change::Harmless => "changed",
            Change::Said => "changed, so the run will differ from the uninterrupted one",
            Change::AsFromTheStart => "changed, as if the run had started with it",
            Change::SameTokens => "changed, the tokens are the same",
        };
        out::note(format_args!("{what}: {text}"));
    }
    let kind = |device: &str| device.split(':').next().unwrap_or_default().to_owned();
    if kind(json.device()) != kind(device) {
        out::note(format_args!(
            "the run was on {} and continues on {device}: its bits may differ from there on",
            json.device()
        ));
    } else if !exact {
        out::note(
            "the state was kept in other element types and is converted: its bits may differ from there on",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_that_may_change_is_a_flag() {
        let command = crate::command();
        let train = command.find_subcommand("train").unwrap();
        let flags: Vec<&str> = train.get_arguments().filter_map(clap::Arg::get_long).collect();
        for key in MAY_CHANGE.iter().flat_map(|(_, keys)| keys.split(' ')) {
            assert!(flags.contains(&key), "{key}");
        }
    }
}
