//! The words of a description: which family it is of, and how its positions were scaled.

use crate::model::describe::FieldValue;
use crate::model::notation::Given;
use ironhorse_core::op::{Gain, Gate};
use serde_json::{Value, json};
use std::fmt;

/// Declares a field whose value is one of some words; the first is the one that models had before the field existed.
macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its word.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FieldValue for $name {
            const BLANK: Self = Self::ALL[0];

            fn expected() -> String {
                $crate::error::one_of(Self::ALL)
            }

            fn read(given: &Given) -> Option<Self> {
                let word = given.word()?;
                Self::ALL.iter().copied().find(|one| one.name() == word)
            }

            fn json(self) -> Value {
                json!(self.name())
            }
        }
    };
}

words! {
    /// What a decoder of Llama's design has of its own: the names of its parameters, and which biases and norms there are.
    Family {
        /// Llama; with experts Mixtral.
        Llama = "llama",
        /// Mistral: as Llama, with a window if it has one.
        Mistral = "mistral",
        /// Qwen 2 and 2.5: q, k and v have biases.
        Qwen2 = "qwen2",
        /// Qwen 3: each head of q and k is normalised before its rotation. With experts Qwen 3 MoE.
        Qwen3 = "qwen3",
        /// Gemma 3, its text: norms of 1 + weight before and after attention and MLP and of each head of q and k, GELU as the gate,
        /// a scaled embedding, and two kinds of layers, which differ in window and RoPE.
        Gemma3 = "gemma3_text",
    }
}

words! {
    /// How RoPE's wavelengths were changed for a longer context.
    RopeType {
        /// Not at all.
        Default = "default",
        /// All by one factor.
        Linear = "linear",
        /// The long ones by a factor, as Llama 3.1 does.
        Llama3 = "llama3",
    }
}

/// Which layers of a family may have a window.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WindowLayers {
    /// No layer.
    None,
    /// All or none of them.
    All,
    /// The layers from one of them on.
    Last,
    /// All but every n-th.
    Pattern,
}

impl Family {
    /// The kind of a model of this family; `None` where the family has none with experts.
    pub(crate) fn kind(self, has_experts: bool) -> Option<&'static str> {
        match (self, has_experts) {
            (Self::Llama, true) => Some("moe"),
            (Self::Qwen3, true) => Some("qwen3_moe"),
            (_, true) => None,
            (family, false) => Some(family.name()),
        }
    }

    /// The family of a kind.
    pub(crate) fn of_kind(kind: &str) -> Self {
        let same = |family: &&Self| [true, false].iter().any(|&has| family.kind(has) == Some(kind));
        Self::ALL.iter().find(same).copied().unwrap_or(Self::BLANK)
    }

    /// Which layers may have a window.
    pub(super) fn windows(self, has_experts: bool) -> WindowLayers {
        match (self, has_experts) {
            (Self::Llama, false) => WindowLayers::None,
            (Self::Gemma3, _) => WindowLayers::Pattern,
            (Self::Qwen2 | Self::Qwen3, false) => WindowLayers::Last,
            _ => WindowLayers::All,
        }
    }

    /// Whether q, k and v have biases.
    pub(crate) fn has_qkv_bias(self) -> bool {
        self == Self::Qwen2
    }

    /// Whether the heads of q and k are normalised.
    pub(crate) fn has_qk_norm(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Gemma3)
    }

    /// Whether the results of attention and MLP are normalised before they are added to the residual stream.
    pub(crate) fn has_post_norms(self) -> bool {
        self == Self::Gemma3
    }

    /// Whether embeddings are multiplied by √C.
    pub(super) fn scales_embedding(self) -> bool {
        self == Self::Gemma3
    }

    /// What norms multiply by.
    pub(crate) fn gain(self) -> Gain {
        if self == Self::Gemma3 { Gain::OnePlusWeight } else { Gain::Weight }
    }

    /// The gate of the MLP.
    pub(super) fn gate(self) -> Gate {
        if self == Self::Gemma3 { Gate::Gelu } else { Gate::Silu }
    }
}
