//! The paths of the model's server.

/// The path of a model, up to its name.
pub const MODEL: &str = "/v1/models/";

/// What a path asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    Page,
    Health,
    Metrics,
    Models,
    Model,
    Write { chat: bool },
    Other,
}

impl Path {
    /// What this path asks for.
    pub fn of(path: &str) -> Self {
        match path {
            "/" => Self::Page,
            "/health" => Self::Health,
            "/metrics" => Self::Metrics,
            "/v1/models" => Self::Models,
            "/v1/completions" => Self::Write { chat: false },
            "/v1/chat/completions" => Self::Write { chat: true },
            _ if path.starts_with(MODEL) => Self::Model,
            _ => Self::Other,
        }
    }

    /// The name that its requests are counted under.
    pub fn name(self) -> &'static str {
        match self {
            Self::Page => "/",
            Self::Health => "/health",
            Self::Metrics => "/metrics",
            Self::Models => "/v1/models",
            Self::Model => "/v1/models/…",
            Self::Write { chat: false } => "/v1/completions",
            Self::Write { chat: true } => "/v1/chat/completions",
            Self::Other => "other",
        }
    }
}
