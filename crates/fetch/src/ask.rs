//! One answer from a server: redirects are followed here, where it is decided who gets the token; what may pass by itself
//! is tried again; a refusal says what to do.

use crate::error::one_line;
use crate::http::{Answer, Client, Failure, Request};
use crate::watch::{Progress, Watch};
use crate::{Error, Repo, Result, Settings};
use std::ops::ControlFlow;
use std::time::Duration;

/// Tries without a byte of progress between them.
const TRIES: u32 = 6;
/// The longest wait between two tries; a server that asks for a longer one is busy for the day.
const LONGEST: Duration = Duration::from_secs(300);
/// Redirects of one request.
const HOPS: usize = 10;

/// A question to a server.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    /// How messages call what is asked for: the repository and the file.
    pub what: &'a str,
    /// The repository it is of.
    pub repo: Option<&'a Repo>,
    /// The address.
    pub url: &'a str,
    /// The first byte wanted.
    pub from: u64,
    /// Headers only, and those of the hub itself: a redirect to another server is an answer.
    pub facts: bool,
    /// How far all is.
    pub progress: Progress<'a>,
}

/// Counts tries. Progress makes patience new.
#[derive(Default)]
pub struct Patience {
    tries: u32,
}

impl Patience {
    /// Something arrived.
    pub fn renew(&mut self) {
        self.tries = 0;
    }

    /// Waits before the next try, or says that there is none.
    pub fn wait(
        &mut self,
        ask: &Question<'_>,
        why: &str,
        after: Option<Duration>,
        watch: &mut dyn Watch,
    ) -> Result<()> {
        self.tries += 1;
        let time = after.unwrap_or(Duration::from_secs(1 << (self.tries - 1).min(4)));
        let failed = |problem: String| {
            Err(Error::Server { what: ask.what.to_owned(), problem, address: ask.url.to_owned() })
        };
        if self.tries >= TRIES {
            return failed(format!(
                "{why}, {TRIES} times; what has arrived is kept, and the same command goes on from there"
            ));
        }
        if time > LONGEST {
            return failed(format!(
                "{why}, and the server asks to wait {} s; try again then",
                time.as_secs()
            ));
        }
        watch.note(&format!("{}: {why}; trying again in {} s", ask.what, time.as_secs()));
        match watch.pause(time, ask.progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Stopped),
        }
    }
}

/// Asks servers.
pub struct Asker<'a> {
    pub settings: &'a Settings,
    pub client: &'a Client,
}

impl Asker<'_> {
    /// The answer to a question: 200, 206, or 416. Everything else is tried again or an error.
    pub fn answer(
        &self,
        ask: &Question<'_>,
        patience: &mut Patience,
        watch: &mut dyn Watch,
    ) -> Result<Answer> {
        loop {
            let mut stop = || watch.progress(ask.progress).is_break();
            match self.follow(ask, &mut stop) {
                Ok(answer) if matches!(answer.status, 408 | 429 | 500..) => {
                    let after = answer.header("retry-after").and_then(|text| text.trim().parse().ok());
                    let why = format!("the server answers {}", answer.status);
                    patience.wait(ask, &why, after.map(Duration::from_secs), watch)?;
                }
                Ok(answer)
                    if matches!(answer.status, 200 | 206 | 416) || ask.facts && answer.status < 400 =>
                {
                    return Ok(answer);
                }
                Ok(answer) => return Err(self.refusal(ask, &answer)),
                Err(Failure::Stopped) => return Err(Error::Stopped),
                Err(Failure::Lost(why)) => patience.wait(ask, &one_line(&why), None, watch)?,
                Err(Failure::Unreachable(why)) => {
                    return Err(Error::Missing {
                        what: ask.what.to_owned(),
                        reason: format!("{} cannot be reached ({})", origin(ask.url), one_line(&why)),
                        advice: String::new(), // whoever knows the place of the file adds it
                    });
                }
            }
        }
    }

    fn follow(&self, ask: &Question<'_>, stop: &mut dyn FnMut() -> bool) -> Result<Answer, Failure> {
        let mut url = ask.url.to_owned();
        for _ in 0..HOPS {
            let hub = origin(&url) == origin(&self.settings.endpoint);
            // only the hub gets the token, never the servers it redirects to
            let token = self.settings.token.clone().filter(|_| hub);
            let request = Request { head: ask.facts, url: url.clone(), token, from: ask.from };
            let answer = self.client.send(request, stop)?;
            let target =
                answer.header("location").filter(|_| matches!(answer.status, 301 | 302 | 303 | 307 | 308));
            let Some(target) = target.map(|target| join(&url, target)) else { return Ok(answer) };
            if ask.facts && origin(&target) != origin(&url) {
                return Ok(answer);
            }
            if url.starts_with("https:") && !target.starts_with("https:") {
                return Err(Failure::Unreachable(format!(
                    "it redirects to {target}, which is not encrypted"
                )));
            }
            url = target;
        }
        Err(Failure::Unreachable(format!("more than {HOPS} redirects")))
    }

    /// What a status that is not tried again means.
    fn refusal(&self, ask: &Question<'_>, answer: &Answer) -> Error {
        let (what, address) = (ask.what.to_owned(), ask.url.to_owned());
        let code = answer.header("x-error-code").unwrap_or_default();
        let said = answer.header("x-error-message").map(one_line).filter(|text| !text.is_empty());
        let page = |repo: &Repo| format!("{}/{}", self.settings.endpoint, repo.page());
        let not_found = |problem: &str| Error::NotFound {
            what: what.clone(),
            problem: problem.into(),
            address: address.clone(),
        };
        match (answer.status, code, ask.repo) {
            // the hub answers 401 for what does not exist, too, unless it knows who asks
            (401 | 404, "RepoNotFound", Some(_)) => not_found(
                "the hub has no such repository, or it is private: check the name, and set HF_TOKEN to a token that may read it",
            ),
            (404, "RevisionNotFound", Some(_)) => not_found("the repository has no such revision"),
            (401 | 403, _, Some(repo)) => Error::Refused {
                what,
                status: answer.status,
                said: said.map_or_else(String::new, |said| format!(", {said}")),
                page: page(repo),
            },
            (404 | 410, ..) => not_found("there is no such file or repository"),
            (status, ..) => {
                let said = said.map_or_else(String::new, |said| format!(": {said}"));
                Error::Server { what, problem: format!("the server answers {status}{said}"), address }
            }
        }
    }
}

/// Scheme, host and port of an address.
pub fn origin(url: &str) -> &str {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |at| start + at);
    &url[..end]
}

/// The address that a `Location` means.
fn join(base: &str, target: &str) -> String {
    if target.contains("://") {
        target.to_owned()
    } else if let Some(rest) = target.strip_prefix("//") {
        format!("{}://{rest}", base.split("://").next().unwrap_or("https"))
    } else if target.starts_with('/') {
        format!("{}{target}", origin(base))
    } else {
        let path = base.split(['?', '#']).next().unwrap_or(base);
        let folder = path.rfind('/').filter(|&at| at >= origin(base).len()).map_or(path.len(), |at| at);
        format!("{}/{target}", &path[..folder])
    }
}

/// A path or revision as part of an address; `/` only where it separates.
pub fn encode(text: &str, slash: bool) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        let plain = byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || slash && byte == b'/';
        if plain { out.push(byte.into()) } else { out += &format!("%{byte:02X}") }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!(origin("https://a.b:1/c/d?e"), "https://a.b:1");
        assert_eq!(origin("http://a"), "http://a");
        assert_eq!(join("https://a/b/c?x=/y", "d"), "https://a/b/d");
        assert_eq!(join("https://a/b", "/c?d"), "https://a/c?d");
        assert_eq!(join("https://a", "b"), "https://a/b");
        assert_eq!(join("https://a/b", "http://c/d"), "http://c/d");
        assert_eq!(join("https://a/b", "//c/d"), "https://c/d");
        assert_eq!(encode("a b/ü#", true), "a%20b/%C3%BC%23");
        assert_eq!(encode("refs/pr/1", false), "refs%2Fpr%2F1");
    }
}
