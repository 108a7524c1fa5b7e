//! Which weights of a layer have adapters.

use crate::{Error, Result};
use std::fmt;

/// A weight of a layer that can have an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The projection after the attention.
    O,
    /// What SwiGLU applies silu to.
    Gate,
    /// What it multiplies that with.
    Up,
    /// The projection after it.
    Down,
}

impl Target {
    /// All of them, in the order of a layer.
    pub const ALL: [Self; 7] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];
    /// The targets after the attention.
    pub const MLP: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
            Self::O => "o",
            Self::Gate => "gate",
            Self::Up => "up",
            Self::Down => "down",
        }
    }

    /// The name of its module in Hugging Face's models, as in `target_modules` of PEFT.
    pub const fn module(self) -> &'static str {
        match self {
            Self::Q => "q_proj",
            Self::K => "k_proj",
            Self::V => "v_proj",
            Self::O => "o_proj",
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }

    /// Where it is in a layer: `self_attn.q_proj`.
    pub fn place(self) -> String {
        let part = if Self::MLP.contains(&self) { "mlp" } else { "self_attn" };
        format!("{part}.{}", self.module())
    }

    /// All names, for errors.
    pub(super) fn listed() -> String {
        format!("{}, or all", Self::ALL.map(Self::name).join(", "))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of targets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Targets(u8);

impl Targets {
    /// Parses `q,v` or `q_proj,v_proj`; `all` is every one.
    pub fn parse(text: &str) -> Result<Self> {
        let mut targets = Self::default();
        for word in text.split(',').map(str::trim) {
            if word == "all" {
                Target::ALL.into_iter().for_each(|target| targets.insert(target));
                continue;
            }
            let named = |target: &Target| word == target.name() || word == target.module();
            let target = Target::ALL.into_iter().find(named);
            let unknown = || Error::unknown("target of adapters", word, Target::listed());
            targets.insert(target.ok_or_else(unknown)?);
        }
        Ok(targets)
    }

    /// Adds one.
    pub fn insert(&mut self, target: Target) {
        self.0 |= 1 << target as u8;
    }

    /// Whether it has one.
    pub fn has(self, target: Target) -> bool {
        self.0 & (1 << target as u8) != 0
    }

    /// The targets of either.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether it has none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// In the order of a layer.
    pub fn iter(self) -> impl Iterator<Item = Target> {
        Target::ALL.into_iter().filter(move |&target| self.has(target))
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.iter().map(Target::name).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_kinds_are_read() {
        let targets = Targets::parse("v, q_proj,down").unwrap();
        assert_eq!(targets.to_string(), "q,v,down");
        assert_eq!(Targets::parse("all").unwrap().iter().count(), 7);
        assert_eq!(Targets::parse("all").unwrap().to_string(), "q,k,v,o,gate,up,down");
        let error = Targets::parse("q,lm_head").unwrap_err().to_string();
        assert!(error.contains("lm_head") && error.contains("q, k, v, o, gate, up, down, or all"), "{error}");
        assert!(Targets::parse("").is_err());
    }
}
