//! `ironhorse train`
//!
//! ```text
//! args.rs    the flags, which are also the run's config.toml     data.rs    shards or stories, checked before the first step
//! resume.rs  resuming a run, and what may change then            report.rs  what is printed at the end; run.json
//! defaults.rs  settings that depend on the model and the steps  text.rs  text as data, prepared once
//! checks.rs  flags that need each other, room on the disk        watch.rs   who is told, who may stop it, how long it took
//! chat.rs    chats as data, packed                               tune.rs    what `ironhorse tune` chooses
//! pairs.rs   pairs of answers, cut                               samples.rs  lines of chats, split, cut, left out
//! ranks.rs   several processes: start, agreement, who prints
//! ```

mod args;
mod chat;
mod checks;
mod data;
mod defaults;
mod pairs;
mod ranks;
mod report;
mod resume;
mod samples;
mod text;
mod tune;
mod watch;

pub use args::TrainArgs;
pub use chat::note_disorder;
pub use ranks::Party;
pub use report::TrainReport;
pub use samples::Tally;
pub use text::text_as_shards;
pub use tune::TuneArgs;
pub use watch::{Trained, Watch};

use super::choices;
use super::fetch::names;
use super::model::{RUNS, beside};
use super::workload::{note_experts, parameters_text};
use crate::hardware::check_memory;
use crate::loading::load_base;
use crate::progress::Progress;
use crate::signals::Handlers;
use crate::{Outcome, number, out};
use anyhow::{Context, Result, bail};
use ironhorse::core::Engine;
use ironhorse::train::data::SourceFacts;
use ironhorse::train::format::checkpoint::TrainerState;
use ironhorse::train::format::hf::TextTokens;
use ironhorse::train::format::tokenizer::KeptTokenizer;
use ironhorse::train::format::{ModelChoice, WeightSource, open_weights};
use ironhorse::train::generate::codec::Codec;
use ironhorse::train::model::ModelConfig;
use ironhorse::train::run::rampup::Rampup;
use ironhorse::train::run::schedule::{DECAY_FRACTION, LrSchedule};
use ironhorse::train::run::{
    self, Control, InitFacts, Job, RunFolder, RunJson, SaveSettings, Saver, TrainSettings,
};
use ironhorse::train::session::{Session, SessionSpec};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;
use watch::Timed;

/// What `--model` is, if not given.
pub const BUILTIN: &str = "builtin";

/// Runs the command; `line` is the command line as it was given.
pub fn run(args: &TrainArgs, line: &[OsString]) -> Result<Outcome> {
    // from the start: a signal while the data is checked ends the command well, too
    let control = Control::default();
    let _handlers = Handlers::install(&control).context("cannot listen to signals")?;
    if let Some(outcome) = ranks::start(args, line, &control)? {
        return Ok(outcome);
    }
    let party = Party::join(args, &control)?;
    let mut progress = Progress::new();
    let watch = &mut Watch { control: &control, observer: &mut progress, party: &party };
    let trained = match &args.resume {
        Some(run) => resume::run(run, args, line, watch),
        None => start(args, line, watch).map(Some),
    };
    progress.finish();
    match trained.inspect_err(|error| party.give_up(error))? {
        Some(trained) => report::print(&trained),
        None => Ok(Outcome::Done),
    }
}

/// A new run. Prints notes, and nothing at its end.
pub fn start(args: &TrainArgs, line: &[OsString], watch: &mut Watch<'_>) -> Result<Trained> {
    let (control, party) = (watch.control, watch.party);
    out::check_json_in(args.json.as_deref(), args.out.as_deref())?;
    let mut args = args.clone();
    party.settle(&mut args)?;
    if args.tuning.is_some() {
        tune::check(&args)?;
    }
    if let Some(path) = args.out.as_ref().filter(|_| party.leads()) {
        RunFolder::check_free(path, args.overwrite)?; // before anything is fetched, read or loaded
    }
    party.leader_first(|| resolve_names(&mut args, control))?;
    let (config, mut weights) = choose_model(&args)?;
    checks::adapters(&args, &config, weights.is_some())?;
    refuse_stories_for(&args, &config, weights.as_deref())?;
    match args.chat {
        true => chat::settle(&mut args, &config, weights.as_deref())?,
        false => {
            chat::refuse_flags(&args)?;
            party.leader_first(|| text::replace(&mut args, &config, weights.as_deref(), control))?;
        }
    }
    let chats = if args.chat { Some(chat::read(&args, &config, control)?) } else { None };
    let mut engine = None;
    if let (Some(tuning), Some(chats)) = (args.tuning, &chats) {
        let engine = engine.insert(args.engine.engine()?);
        tuning.settle(&mut args, &config, chats, engine.as_ref())?;
    }
    defaults::settle_batch(&mut args, &config);
    if args.seq > Some(config.max_seq_len()) {
        bail!("--seq {} is beyond the model's context of {}", args.seq.unwrap_or(0), config.max_seq_len());
    }
    let opened = chats.map(|chats| chats.open(&args, &config)).transpose()?;
    if let Some(stats) = opened.as_ref().and_then(|opened| opened.packed) {
        let epochs = args.epochs.unwrap_or_else(|| chat::epochs(stats.samples));
        args.steps = args.steps.or_else(|| Some(chat::steps(&args, stats, epochs)));
        if let Some(tuning) = args.tuning {
            tuning.settle_steps(&mut args);
        }
    }
    let packed = opened.as_ref().and_then(|opened| opened.packed);
    let mut args = defaults::settle(args, &config);
    if args.model != BUILTIN || weights.is_some() {
        args.model = config.to_line();
    }
    if let Some(source) = &weights {
        args.init.get_or_insert(source.path().to_owned());
    }
    args.check_paths()?;
    let mut prepared = Prepared::new(&args, config, watch, Earlier { engine, opened, choices: &[] })?;
    match &mut weights {
        Some(source) => {
            prepared.model = source.text_tokens();
            load_base(&mut prepared.session, source.as_mut())?;
            if prepared.spec.lora.is_some() {
                prepared.session.init(args.seed)?;
            }
        }
        None => prepared.session.init(args.seed)?,
    }
    prepared.measure_reference()?;
    if let (Some(_), Some(stats)) = (args.tuning, packed) {
        out::note(tune::line(&args, stats, &mut prepared)?);
    }
    prepared.agree(party)?;
    if let (Some(path), Some(shape), true) = (&args.save_batches, prepared.spec.train, party.leads()) {
        let count = prepared.settings.all_micro_steps();
        super::batches::save(
            path,
            &mut data::open(&args, &config, control)?.data.train,
            count,
            shape.into(),
        )?;
    }

    let fresh = party.leads() && args.out.as_ref().is_none_or(|path| !path.exists());
    let path = party.path(|| match &args.out {
        Some(path) => Ok(path.clone()),
        None => next_run(Path::new(RUNS)),
    })?;
    let made = party.folder(&path, || new_folder(&path, &args, line, weights.as_deref(), &mut prepared));
    let result =
        made.and_then(|folder| prepared.train(&args, folder, run::new_state(args.of_checkpoint()?), watch));
    if result.is_err() && fresh {
        RunFolder::remove_unused(&path);
        let _ = std::fs::remove_dir(RUNS); // fails unless it is empty, as intended
    }
    result
}

/// Makes the folder of a new run and records what it starts from.
fn new_folder(
    path: &Path,
    args: &TrainArgs,
    line: &[OsString],
    weights: Option<&dyn WeightSource>,
    prepared: &mut Prepared,
) -> Result<RunFolder> {
    if args.overwrite
        && let (Some(Ok(init)), Ok(out)) =
            (args.init.as_ref().map(std::fs::canonicalize), path.canonicalize())
        && init.starts_with(&out)
    {
        bail!("--init is inside --out, which --overwrite would remove; choose another --out");
    }
    let text = toml::to_string_pretty(args).context("the settings are not TOML")?;
    checks::space(path, args, prepared.session.model(), prepared.spec.precision)?;
    let folder = RunFolder::create(path, &text, args.overwrite)?;
    let mut json = RunJson::new(report::started(line, &mut prepared.session, 0));
    json.init = weights.map(|source| InitFacts::of(source.path())).transpose()?;
    json.data = std::mem::take(&mut prepared.facts.0);
    json.val_data = std::mem::take(&mut prepared.facts.1);
    json.write(path)?;
    Ok(folder)
}

/// What a run needs, whether it is new or resumed.
struct Prepared {
    control: Control,
    settings: TrainSettings,
    spec: SessionSpec,
    session: Session,
    data: run::TrainData,
    /// What the data are: of training and of validation.
    facts: (Vec<SourceFacts>, Vec<SourceFacts>),
    /// What `config.json` of the weights of the start says of texts.
    model: TextTokens,
}

/// What is there before a run is prepared.
#[derive(Default)]
struct Earlier<'a> {
    /// The engine, if there is one.
    engine: Option<Box<dyn Engine>>,
    /// The data, if they were read already.
    opened: Option<data::Opened>,
    /// The algorithms of an earlier start.
    choices: &'a [(String, String)],
}

impl Prepared {
    /// Opens engine and data and plans the programs; weights are loaded later.
    fn new(args: &TrainArgs, config: ModelConfig, watch: &Watch<'_>, earlier: Earlier<'_>) -> Result<Self> {
        let (control, party) = (watch.control, watch.party);
        let settings = settings_of(args)?;
        checks::schedule(args, &settings.schedule)?;
        let mut spec = SessionSpec { sums: party.sums(args), ..spec_of(args, &config)? };
        let mut engine = earlier.engine.map_or_else(|| args.engine.engine(), Ok)?;
        party.agree_settings(args, engine.device())?;
        check_memory(engine.as_ref(), &config, &spec)?;
        let opened = earlier.opened.map_or_else(|| data::open(args, &config, control), Ok)?;
        checks::patience(args, opened.data.val.is_some())?;
        // to learn preferences needs the losses of the start
        spec.eval = spec.train.filter(|_| opened.data.val.is_some() || args.dpo);
        // as long as the sequences of training, and as many at a time: what grading needs fits where training does
        spec.score =
            spec.train.map(|(batch, seq)| (seq, batch * seq)).filter(|_| !opened.data.tasks.is_empty());
        spec.decode = opened.data.tokenizer.is_some().then_some(1);
        check_memory(engine.as_ref(), &config, &spec)?; // now with what validation and samples need
        engine.set_choices(earlier.choices)?;
        note_experts(engine.as_ref(), &config, &spec);
        let mut session = Session::new(engine, config, &spec)?;
        party.connect(&mut session)?;
        let (control, facts) = (control.clone(), (opened.train, opened.val));
        let model = TextTokens::Last;
        Ok(Self { control, settings, spec, session, data: opened.data, facts, model })
    }

    /// The tokenizer as checkpoints keep it; what `config.json` of the start says of texts stays.
    fn kept_tokenizer(&self) -> Result<Option<KeptTokenizer>> {
        let kept = self.data.tokenizer.as_deref().map(Codec::kept).transpose()?;
        Ok(match &self.model {
            said @ TextTokens::Said(_) => {
                Some(KeptTokenizer { tokens: said.clone(), ..kept.unwrap_or_default() })
            }
            _ => kept,
        })
    }

    /// Makes sure that all processes do the same, before the first step.
    fn agree(&mut self, party: &Party) -> Result<()> {
        let sums = |facts: &[SourceFacts]| facts.iter().map(|file| file.sha256.clone()).collect::<Vec<_>>();
        let data = format!("{:?} {:?}", self.data.train.state(), sums(&self.facts.0));
        let val = format!("{:?}", sums(&self.facts.1));
        party.agree([&data, &val], &mut self.session)
    }

    /// Measures what the weights of the start give the pairs of preferences, and says so; does nothing without pairs.
    fn measure_reference(&mut self) -> Result<()> {
        if !self.data.train.is_pairs() {
            return Ok(());
        }
        let start = Instant::now();
        run::measure_reference(&mut self.session, &mut self.data, &self.control)?;
        out::note(format_args!(
            "measured how likely the model finds both answers of each pair in {:.1} s",
            start.elapsed().as_secs_f64()
        ));
        Ok(())
    }

    /// How many tokens a step has, where a micro-step has this many.
    fn tokens_text(&self, tokens: u64) -> String {
        let all = tokens * u64::from(self.settings.accumulate);
        match self.settings.rampup {
            None => format!("{all} tokens a step"),
            Some(Rampup { from, steps }) => {
                format!("{} tokens a step that grow to {all} in {steps} steps", tokens * u64::from(from))
            }
        }
    }

    /// Trains.
    fn train(
        mut self,
        args: &TrainArgs,
        mut folder: RunFolder,
        state: TrainerState,
        watch: &mut Watch<'_>,
    ) -> Result<Trained> {
        let config = self.session.config();
        let tokens = args.batch.unwrap_or(1) * args.seq.unwrap_or(1);
        let from = if state.step > 0 { format!(" from step {}", state.step) } else { String::new() };
        out::note(format_args!(
            "{}{}, {} layers of {}, {}, {} steps{from} → {}",
            parameters_text(config.told_params(), config.active_params()),
            report::trained_text(self.session.model()),
            config.layers(),
            config.width(),
            self.tokens_text(tokens as u64),
            self.settings.steps,
            folder.path().display()
        ));
        for task in &self.data.tasks {
            let longest = args.seq.unwrap_or(1) + 1;
            out::note(format_args!(
                "{}: {}; {}",
                task.name,
                choices::counted(task, longest),
                task.definition
            ));
        }
        let tokenizer = self.kept_tokenizer()?;
        let control = self.control.with_time(args.max_time);
        let saves = SaveSettings {
            every: args.save_every,
            minutes: args.save_minutes,
            keep: args.keep,
            every_best: args.patience > 0,
            sync: args.save_sync,
            ..SaveSettings::default()
        };
        let mut saver = Saver::new(&self.session, folder.path(), tokenizer, saves, state.step)?;
        let mut observer = Timed::new(watch.observer);
        let summary = run::train(Job {
            session: &mut self.session,
            data: &mut self.data,
            settings: &self.settings,
            folder: &mut folder,
            saver: &mut saver,
            control: &control,
            observer: &mut observer,
            state,
        })?;
        let times = observer.times();
        let (args, run) = (args.clone(), folder.path().to_owned());
        Ok(Trained { args, run, summary, tasks: self.data.tasks, times })
    }
}

/// Replaces names by the paths they stand for, and fetches what is not there.
fn resolve_names(args: &mut TrainArgs, control: &Control) -> Result<()> {
    if let Some(init) = &mut args.init {
        *init = names::weights(init, control)?;
    }
    let model = names::weights_or_sizes(&args.model, control)?;
    args.model = model.into_os_string().into_string().unwrap_or_else(|_| args.model.clone());
    args.data = names::data(&args.data, control)?;
    args.val_data = names::data(&args.val_data, control)?;
    Ok(())
}

/// The sizes, and the weights if there are any.
fn choose_model(args: &TrainArgs) -> Result<(ModelConfig, Option<Box<dyn WeightSource>>)> {
    let init = args.init.as_deref().map(open_weights).transpose()?;
    if args.model == BUILTIN {
        return Ok((init.as_ref().map_or_else(defaults::builtin_model, |source| source.config()), init));
    }
    let choice = ModelChoice::parse(&args.model)?;
    let config = choice.config();
    if let Some(source) = init.as_ref().filter(|source| !source.config().computes_as(&config)) {
        bail!("--init {} has other sizes than --model {}", source.path().display(), args.model);
    }
    Ok(match choice {
        ModelChoice::Weights(source) => (config, init.or(Some(source))),
        ModelChoice::Sizes(_) => (config, init),
    })
}

/// Refuses to train weights of another vocabulary on the built-in stories, whose tokens are bytes: most likely `--data`
/// was forgotten.
fn refuse_stories_for(
    args: &TrainArgs,
    config: &ModelConfig,
    weights: Option<&dyn WeightSource>,
) -> Result<()> {
    let Some(weights) = weights.filter(|_| args.data.is_empty() && config.vocab_size() != 256) else {
        return Ok(());
    };
    // trained on bytes before, in a model that could hold more tokens
    if beside(weights, weights.path())?.is_some_and(|tokenizer| tokenizer.keeps_bytes()) {
        return Ok(());
    }
    bail!(
        "{}: has a vocabulary of {} tokens, and the built-in stories are bytes; give the shards to train on with --data \
         'shards/*_train_*.bin' --val-data 'shards/*_val_*.bin', and --tokenizer FILE for samples",
        weights.path().display(),
        config.vocab_size()
    );
}

/// What a run computes, without what its data decide.
fn spec_of(args: &TrainArgs, config: &ModelConfig) -> Result<SessionSpec> {
    let seq = args.seq.unwrap_or(1);
    Ok(SessionSpec {
        train: Some((args.batch.unwrap_or(1), seq)),
        // samples are as long as the sequences of training, at most
        decode_context: Some(seq),
        recompute: args.recompute.into(),
        head_chunks: args.head_chunks,
        dropout: number::drop_rate(args.dropout)?,
        packed: args.chat,
        preference: args.preference(),
        precision: args.state.precision(args.engine.dtype()?, args.accumulate)?,
        lora: args.adapters.lora(config)?,
        ..SessionSpec::default()
    })
}

fn settings_of(args: &TrainArgs) -> Result<TrainSettings> {
    let steps = args.steps.context("--steps is missing")?;
    Ok(TrainSettings {
        seed: args.seed,
        steps,
        accumulate: args.accumulate,
        rampup: checks::rampup(args, steps)?,
        schedule: LrSchedule {
            kind: args.schedule.into(),
            peak: args.lr.context("--lr is missing")?,
            warmup_steps: args.warmup.unwrap_or(0),
            total_steps: steps,
            final_fraction: args.final_fraction.context("--final-fraction is missing")?,
            decay_fraction: args.decay_fraction.unwrap_or(DECAY_FRACTION),
        },
        beta1: args.beta1,
        beta2: args.beta2.context("--beta2 is missing")?,
        eps: args.eps,
        weight_decay: args.weight_decay,
        grad_clip: args.grad_clip,
        bad_steps: args.bad_steps,
        recompute: args.recompute.into(),
        head_chunks: args.head_chunks,
        dropout: number::drop_rate(args.dropout)?,
        preference: args.preference(),
        val_every: args.val_every.unwrap_or(0),
        val_batches: args.val_batches,
        patience: args.patience,
        eval_every: args.eval_every,
        sample_every: args.sample_every.unwrap_or(0),
        sample_tokens: args.sample_tokens.unwrap_or(0),
        sampler: args.sampling.sampler(args.seed),
    })
}

/// Makes the folder of the first number below `runs` that is not taken. Making it is what takes it: two runs that
/// start at once get two folders.
fn next_run(runs: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(runs).with_context(|| format!("{}: cannot create", runs.display()))?;
    let mut number = 1_u32;
    loop {
        let path = runs.join(format!("{number:04}"));
        match std::fs::create_dir(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
            made => return made.with_context(|| format!("{}: cannot create", path.display())).map(|()| path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn runs_that_start_at_once_get_folders_of_their_own() {
        let place = tempfile::tempdir().unwrap();
        let runs = place.path().join("runs");
        let made: Vec<PathBuf> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| next_run(&runs).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let different: BTreeSet<&PathBuf> = made.iter().collect();
        assert_eq!(different.len(), 8, "{made:?}");
        assert_eq!(different.last().unwrap().file_name().unwrap(), "0008");
    }
}
