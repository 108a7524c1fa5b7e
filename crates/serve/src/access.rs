//! Who may ask.

use crate::error::{ApiError, quoted};
use crate::http::Request;
use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, HOST};

/// Who may ask.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// What a client must send as its bearer token.
    pub api_key: Option<String>,
    /// The origin of pages, other than our own, that may ask; `*` for all.
    pub cors: Option<String>,
    /// Whether only this machine can reach us: then names of other machines are refused, which a web page that knows our port could
    /// otherwise give us.
    pub loopback: bool,
}

impl Access {
    /// Refuses a client that may not ask.
    pub fn check(&self, request: &Request) -> Result<(), ApiError> {
        self.check_host(request)?;
        let Some(key) = &self.api_key else { return Ok(()) };
        let given = request.headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or("").trim();
        if same(given.as_bytes(), key.as_bytes()) {
            return Ok(());
        }
        let message = match given {
            "" => "no API key: send the header `Authorization: Bearer KEY`",
            _ => "the API key is wrong",
        };
        Err(ApiError::new(StatusCode::UNAUTHORIZED, Some("invalid_api_key"), message))
    }

    /// Refuses foreign host names on the loopback address if there is no key: a page of another site could reach us under its own name.
    fn check_host(&self, request: &Request) -> Result<(), ApiError> {
        if !self.loopback || self.api_key.is_some() || self.cors.is_some() {
            return Ok(());
        }
        let host = request.headers.get(HOST).and_then(|value| value.to_str().ok()).unwrap_or("");
        let name = match host.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or(""),
            None => host.split(':').next().unwrap_or(""),
        };
        let local = name == "localhost" || name.parse().is_ok_and(|at: std::net::IpAddr| at.is_loopback());
        if local {
            return Ok(());
        }
        let message = format!(
            "the host is {}, expected this machine's own name; give the server a key to serve others",
            quoted(host)
        );
        Err(ApiError::new(StatusCode::FORBIDDEN, Some("wrong_host"), message))
    }
}

/// Whether two texts are the same, in a time that does not tell where they differ.
fn same(a: &[u8], b: &[u8]) -> bool {
    let longest = a.len().max(b.len());
    let byte = |text: &[u8], at: usize| text.get(at).copied().unwrap_or(0);
    let differ = (0..longest).fold(a.len() ^ b.len(), |all, at| all | usize::from(byte(a, at) ^ byte(b, at)));
    std::hint::black_box(differ) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole() {
        assert!(same(b"", b"") && same(b"key", b"key"));
        for (a, b) in [("key", "kez"), ("key", "ke"), ("", "k"), ("key\0", "key"), ("a", "b")] {
            assert!(!same(a.as_bytes(), b.as_bytes()), "{a} {b}");
        }
    }
}
