//! How a session starts: from weights, at random, or with adapters on a frozen base.

use super::Session;
use super::ranks::NO_MASTERS;
use super::state::write_weights;
use crate::Result;
use crate::format::checkpoint::CheckpointAdapter;
use crate::format::peft::AdapterFolder;
use crate::model::{BaseDigest, init};
use ironhorse_core::Pool;
use std::path::Path;

impl Session {
    /// A random start, of adapters where there are any.
    pub fn init(&mut self, seed: u64) -> Result<()> {
        let slots = self.param_slots(Pool::Params)?;
        let masters = self.master_slots()?;
        let mut next = slots.iter().enumerate();
        let engine = self.engine.as_mut();
        let put = |_: &str, values: &[f32]| match next.next() {
            Some((i, (_, slot))) => {
                let masters = masters.get(i).unwrap_or(&NO_MASTERS);
                write_weights(engine, (*slot, masters), values)
            }
            None => Ok(()),
        };
        match self.model.lora {
            Some(lora) => lora.random(&self.model.config, seed, put),
            None => init::random(&self.model.config, seed, put),
        }
    }

    /// Random weights of the model itself, whether they are trained or frozen beside adapters: for measurements.
    pub fn init_base(&mut self, seed: u64) -> Result<()> {
        if self.model.lora.is_none() {
            return self.init(seed);
        }
        let slots = self.param_slots(Pool::Frozen)?;
        let mut next = slots.iter();
        let engine = self.engine.as_mut();
        init::random(&self.model.config, seed, |_, values| match next.next() {
            Some((_, slot)) => write_weights(engine, (*slot, &NO_MASTERS), values),
            None => Ok(()),
        })
    }

    /// Loads the model's own weights from a file or folder, `read(name, values)` for every tensor in model order, whether
    /// they are trained or frozen beside adapters. Gives what tells this base from another.
    pub fn load_base(
        &mut self,
        path: &Path,
        mut read: impl FnMut(&str, &mut [f32]) -> Result<()>,
    ) -> Result<BaseDigest> {
        let mut digest = BaseDigest::default();
        let pool = if self.model.lora.is_some() { Pool::Frozen } else { Pool::Params };
        self.load(pool, |name, values| {
            read(name, values)?;
            digest.add(name, values);
            Ok(())
        })?;
        let base = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let digest_text = digest.text();
        self.base = self.model.lora.map(|lora| CheckpointAdapter { lora, base, digest: digest_text });
        Ok(digest)
    }

    /// The frozen base and the adapters on it, once it is loaded.
    pub fn base(&self) -> Option<&CheckpointAdapter> {
        self.base.as_ref()
    }

    /// Puts an adapter on the frozen base in place of the one before; the session's own may cover it
    /// ([`Lora::covering`](crate::model::Lora::covering)).
    pub fn load_adapter(&mut self, adapter: &mut AdapterFolder) -> Result<()> {
        let cover = self.model.lora.unwrap_or_else(|| adapter.lora());
        let table = self.model.tensors();
        let mut specs = table.iter();
        self.load(Pool::Params, |_, values| match specs.next() {
            Some(spec) => adapter.read_as(&cover, &spec.name, values),
            None => Ok(()),
        })
    }
}
