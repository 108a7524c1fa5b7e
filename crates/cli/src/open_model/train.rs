//! `ironhorse train` and `tune` from the weights of an open model, with the same settings and the same files; the model then has the
//! weights of the run's last checkpoint.

use super::OpenModel;
use crate::args::FlagValue;
use crate::args::config_file::{line_of, table_of_json};
use crate::commands::model::find_tokenizer;
use crate::commands::train::{Party, TrainReport, Watch, start};
use crate::{Refusal, out, parse_line, signals, train_args};
use anyhow::{Result, bail};
use ironhorse::train::format::open_weights;
use ironhorse::train::run::{Control, Observer};
use std::rc::Rc;

/// What a caller stores in [`Control::stop_flag`] to stop a run.
pub const STOPPED_BY_CALLER: usize = signals::CALLER;

/// Flags of the command that mean nothing here, and why.
const NOT_HERE: [(&str, &str); 6] = [
    ("config", "settings are given as arguments"),
    ("help", "see `ironhorse train --help` and `ironhorse tune --help`"),
    ("init", "training starts from the weights of this model"),
    ("json", "the report is what is returned"),
    ("model", "training starts from the weights of this model"),
    ("resume", "a run is resumed with `ironhorse train --resume RUN`"),
];

/// The commands that train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Training {
    /// `ironhorse train`.
    Train,
    /// `ironhorse tune`.
    Tune,
}

impl Training {
    /// The name of the command.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Tune => "tune",
        }
    }
}

/// Who is told of a run.
pub struct Calls<'a> {
    /// Requests to stop or to save.
    pub control: &'a Control,
    /// Is told of every step.
    pub observer: &'a mut dyn Observer,
    /// Is told what the command would print on standard error.
    pub note: Rc<dyn Fn(&str)>,
}

impl OpenModel {
    /// Trains; `settings` are those of the command as JSON. Gives the command's report as JSON. After an error the model
    /// has the weights that it had.
    pub fn train(
        &mut self,
        (command, settings): (Training, &str),
        calls: Calls<'_>,
    ) -> Result<String, Refusal> {
        self.session = None; // training needs the memory
        let Calls { control, observer, note } = calls;
        let trained = out::notes_to(note, || {
            let party = &Party::default();
            self.run(command.name(), settings, &mut Watch { control, observer, party })
        });
        // a request to stop was obeyed; the weights are wanted all the same
        let back = self.session(&Control::default()).map(drop);
        let report = trained.map_err(|error| Refusal::of(&error))?;
        back.map_err(|error| Refusal::of(&error))?;
        Ok(report)
    }

    fn run(&mut self, command: &str, settings: &str, watch: &mut Watch<'_>) -> Result<String> {
        let line = line_of(command, self.table(command, settings)?, command)?;
        let given = line.args.clone();
        let args = train_args(parse_line(&line, given.clone())?)?;
        let trained = start(&args, &given, watch)?;
        let source = open_weights(&trained.summary.checkpoint)?;
        let named = self.flags.tokenizer.as_deref();
        if let Ok(found) = find_tokenizer(named, source.as_ref(), &trained.summary.checkpoint) {
            self.tokenizer = Ok(found);
        }
        self.source = source;
        Ok(serde_json::to_string(&TrainReport::of(&trained))?)
    }

    /// The settings given, and those that follow from the model.
    fn table(&self, command: &str, settings: &str) -> Result<toml::Table> {
        let mut table = table_of_json(settings)?;
        for (key, why) in NOT_HERE {
            if table.contains_key(key) {
                bail!("{command}: `{key}` is not a setting here: {why}");
            }
        }
        let Some(init) = self.path().to_str() else {
            bail!("{}: the path is not UTF-8, so config.toml cannot hold it", self.path().display());
        };
        let engine = &self.flags.engine;
        let own = [
            ("init", Some(init.to_owned())),
            ("device", Some(engine.device.clone())),
            ("dtype", engine.asked_dtype().map(FlagValue::name)),
            ("threads", Some(engine.threads.to_string())),
            ("tokenizer", self.flags.tokenizer.as_ref().and_then(|path| Some(path.to_str()?.to_owned()))),
        ];
        for (key, value) in own {
            if let Some(value) = value.filter(|_| !table.contains_key(key)) {
                table.insert(key.to_owned(), value.into());
            }
        }
        Ok(table)
    }
}
