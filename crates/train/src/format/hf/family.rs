//! What a model family says about its `config.json`. The families are the files next to this one, and
//! [`config_json`](super::config_json()) lists them.

use std::path::Path;

use serde_json::{Map, Value};

use crate::Result;
use crate::model::ModelConfig;
use crate::model::describe::{Described, Field};

/// How `transformers` describes a family of models. Which key holds which size is in the table of `Config`.
pub(super) trait Family {
    /// Our configuration of the family.
    type Config: Described + Into<ModelConfig>;
    /// The value of `model_type`.
    const MODEL_TYPE: &'static str;
    /// The value of `architectures`.
    const ARCHITECTURE: &'static str;
    /// What we call such a model.
    const KIND: &'static str;
    /// Fields of our configuration that its files do not have: they keep our defaults.
    const WITHOUT: &'static [&'static str] = &[];
    /// Fields of our configuration that have another key here than in the table: ours, theirs.
    const RENAMED: &'static [(&'static str, &'static [&'static str])] = &[];
    /// Keys that `prepare` and `finish` read.
    const READ: &'static [&'static str] = &[];

    /// The configuration, if it describes a model of this family.
    fn of(config: &ModelConfig) -> Option<&Self::Config>;

    /// Settings that change the computation, each with the values that we support. If a key is absent, transformers
    /// uses the first.
    fn settings() -> Vec<(&'static str, Vec<Value>)>;

    /// The keys of a field; empty if files do not have it.
    fn keys(field: &Field<Self::Config>) -> &'static [&'static str] {
        let ours = field.names[0];
        let renamed = Self::RENAMED.iter().find(|(name, _)| *name == ours);
        match renamed {
            _ if Self::WITHOUT.contains(&ours) => &[],
            Some((_, theirs)) => theirs,
            None => field.hf,
        }
    }

    /// Fills in the defaults of transformers for absent keys, and rejects what we do not support.
    fn prepare(_map: &mut Map<String, Value>, _path: &Path) -> Result<()> {
        Ok(())
    }

    /// Takes over what is not one key of one field, and rejects a file whose other keys contradict its sizes.
    fn finish(_map: &Map<String, Value>, _config: &mut Self::Config, _path: &Path) -> Result<()> {
        Ok(())
    }

    /// The file in the order of its keys; sizes are null here and filled in from the table.
    fn template(config: &Self::Config) -> Value;
}
