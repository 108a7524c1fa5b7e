//! Where the caches are, who asks and whom: the environment variables that huggingface_hub reads, with the same meaning.

use crate::{KnownFile, known};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What decides where a name is looked for.
#[derive(Clone)]
pub struct Settings {
    /// Hugging Face's cache of repositories: `HF_HUB_CACHE`, or `hub` below `HF_HOME`, or below
    /// `~/.cache/huggingface`.
    pub hub: Option<PathBuf>,
    /// Ironhorse's own cache, for files outside the hub; `None` if there is no such folder.
    pub own: Option<PathBuf>,
    /// The hub's address without a slash at the end: `HF_ENDPOINT`.
    pub endpoint: String,
    /// `HF_TOKEN`, or the file that `hf auth login` writes. Sent to the hub only.
    pub token: Option<String>,
    /// `HF_HUB_OFFLINE`: the network is not used.
    pub offline: bool,
    /// A file of certificates to trust instead of those of the program: `SSL_CERT_FILE`, `REQUESTS_CA_BUNDLE`,
    /// `CURL_CA_BUNDLE`.
    pub certificates: Option<PathBuf>,
    /// Proxies for https and for http, and the hosts that need none.
    pub proxies: Proxies,
    /// The files outside the hub.
    pub known: Vec<KnownFile>,
}

/// Proxies by the kind of address they are for.
#[derive(Clone, Debug, Default)]
pub struct Proxies {
    /// `https_proxy` or `all_proxy`.
    pub https: Option<String>,
    /// `http_proxy` or `all_proxy`.
    pub http: Option<String>,
    /// `no_proxy`, separated by commas.
    pub none: String,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let token = self.token.as_ref().map(|_| "…"); // never into a log
        f.debug_struct("Settings").field("hub", &self.hub).field("token", &token).finish_non_exhaustive()
    }
}

impl Settings {
    /// The settings of the environment; `own` is ironhorse's own cache.
    pub fn from_env(own: Option<PathBuf>) -> Self {
        let settings = Self::of(&|name| std::env::var_os(name), own);
        #[cfg(debug_assertions)]
        let settings = settings.with_known_of_tests();
        settings
    }

    pub(crate) fn of(env: &dyn Fn(&str) -> Option<OsString>, own: Option<PathBuf>) -> Self {
        let set = |name: &str| env(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).and_then(|value| value.into_string().ok());
        let user = set("HOME").or_else(|| set("USERPROFILE")).map(PathBuf::from);
        let path = |name: &str| set(name).map(|value| expand(value.into(), user.as_deref()));
        let caches = path("XDG_CACHE_HOME").or_else(|| Some(user.as_ref()?.join(".cache")));
        let home = path("HF_HOME").or_else(|| Some(caches?.join("huggingface")));
        let hub = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let token_file = path("HF_TOKEN_PATH").or_else(|| Some(home.as_ref()?.join("token")));
        let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN"));
        let token = token.or_else(|| std::fs::read_to_string(token_file?).ok());
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        let yes = |name: &str| {
            text(name).is_some_and(|value| {
                ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
            })
        };
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let either = |lower: &str| text(lower).or_else(|| text(&lower.to_ascii_uppercase()));
        Self {
            hub: hub.or_else(|| Some(home?.join("hub"))),
            own,
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token,
            offline: yes("HF_HUB_OFFLINE") || yes("TRANSFORMERS_OFFLINE"),
            certificates: path("SSL_CERT_FILE")
                .or_else(|| path("REQUESTS_CA_BUNDLE"))
                .or_else(|| path("CURL_CA_BUNDLE")),
            proxies: Proxies {
                https: either("https_proxy").or_else(|| either("all_proxy")),
                http: either("http_proxy").or_else(|| either("all_proxy")),
                none: either("no_proxy").unwrap_or_default(),
            },
            known: known::files(),
        }
    }

    /// Replaces the known files, in debug builds only, by a JSON list in the file that `IRONHORSE_KNOWN_FILES` names: tests do not
    /// have the real contents.
    #[cfg(debug_assertions)]
    fn with_known_of_tests(mut self) -> Self {
        let listed = std::env::var_os("IRONHORSE_KNOWN_FILES").and_then(|path| std::fs::read(path).ok());
        if let Some(known) = listed.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
            self.known = known;
        }
        self
    }
}

/// `~/x` as Python's expanduser reads it.
fn expand(path: PathBuf, user: Option<&Path>) -> PathBuf {
    match (path.strip_prefix("~"), user) {
        (Ok(rest), Some(user)) => user.join(rest),
        _ => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Settings {
        let get =
            |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        Settings::of(&get, None)
    }

    #[test]
    fn the_cache_is_where_huggingface_hub_has_it() {
        let hub = |pairs: &[(&str, &str)]| of(pairs).hub.map(|path| path.display().to_string());
        assert_eq!(hub(&[("HOME", "/h")]).unwrap(), "/h/.cache/huggingface/hub");
        assert_eq!(hub(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).unwrap(), "/x/huggingface/hub");
        assert_eq!(hub(&[("HOME", "/h"), ("HF_HOME", "~/f")]).unwrap(), "/h/f/hub");
        assert_eq!(hub(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]).unwrap(), "/c");
        assert_eq!(hub(&[("HF_HOME", ""), ("HOME", "/h")]).unwrap(), "/h/.cache/huggingface/hub");
        assert_eq!(hub(&[]), None);
    }

    #[test]
    fn the_token_is_that_of_the_variable_or_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        assert_eq!(of(&[("HF_HOME", home)]).token.as_deref(), Some("hf_file"));
        assert_eq!(of(&[("HF_HOME", home), ("HF_TOKEN", " hf_x ")]).token.as_deref(), Some("hf_x"));
        assert_eq!(of(&[("HF_HOME", home), ("HF_TOKEN_PATH", "/none")]).token, None);
        assert!(!format!("{:?}", of(&[("HF_TOKEN", "hf_x")])).contains("hf_x"));
    }

    #[test]
    fn proxies_are_for_their_kind_of_address() {
        let found =
            of(&[("HTTPS_PROXY", "http://p:1"), ("all_proxy", "socks5://q:2"), ("NO_PROXY", "localhost,.x")]);
        assert_eq!(found.proxies.https.as_deref(), Some("http://p:1"));
        assert_eq!(found.proxies.http.as_deref(), Some("socks5://q:2"));
        assert_eq!(found.proxies.none, "localhost,.x");
        assert!(of(&[("HF_HUB_OFFLINE", "True")]).offline && !of(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert_eq!(of(&[("HF_ENDPOINT", "http://mirror/")]).endpoint, "http://mirror");
    }
}
