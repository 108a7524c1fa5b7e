//! What a client is told when something is wrong, as OpenAI says it.

use crate::http::{Request, Response, answer};
use hyper::StatusCode;
use serde_json::json;

/// The most bytes of a client's text that an error repeats.
pub(crate) const SHOWN: usize = 60;

/// The beginning of a client's text, as much of it as an error repeats.
pub(crate) fn shown(mut text: String) -> String {
    if text.len() > SHOWN {
        text.truncate(text.floor_char_boundary(SHOWN - '…'.len_utf8()));
        text.push('…');
    }
    text
}

/// As [`shown`], between quotation marks.
pub(crate) fn quoted(text: &str) -> String {
    let mut quoted = shown(format!("{text:?}"));
    if !quoted.ends_with('"') {
        quoted.push('"');
    }
    quoted
}

/// An error of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The status.
    pub status: StatusCode,
    /// What is wrong, and what to do.
    pub message: String,
    /// The parameter at fault.
    pub param: Option<String>,
    /// A short name.
    pub code: Option<&'static str>,
}

impl ApiError {
    /// An error with this status and name.
    pub fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code }
    }

    /// A parameter that is wrong.
    pub fn param(name: &str, message: impl Into<String>) -> Self {
        let param = Some(name.to_owned());
        Self { status: StatusCode::BAD_REQUEST, message: message.into(), param, code: None }
    }

    /// A request that is wrong as a whole.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, None, message)
    }

    /// A method that a path does not have.
    pub fn no_method(request: &Request) -> Self {
        let (method, path) = (shown(request.method.to_string()), quoted(&request.path));
        let message = format!("{method} is not a method of {path}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, None, message)
    }

    /// A path that the server does not have.
    pub fn no_path(path: &str) -> Self {
        let message = format!("{} is not a path of this server", quoted(path));
        Self::new(StatusCode::NOT_FOUND, Some("unknown_url"), message)
    }

    /// What kind of error it is.
    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The error as JSON.
    pub fn json(&self) -> serde_json::Value {
        let Self { message, param, code, .. } = self;
        json!({"error": {"message": message, "type": self.kind(), "param": param, "code": code}})
    }

    /// The error as an answer.
    pub fn response(&self) -> Response {
        let mut response = answer(self.status, "application/json", self.json().to_string());
        let header = match self.status {
            StatusCode::UNAUTHORIZED => Some(("www-authenticate", "Bearer")),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Some(("retry-after", "1")),
            _ => None,
        };
        if let Some((name, value)) = header {
            response.headers_mut().insert(name, hyper::header::HeaderValue::from_static(value));
        }
        response
    }
}
