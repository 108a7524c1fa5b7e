//! Models and data by name: found in Hugging Face's cache or in ours, downloaded when they are not there.
//!
//! ```text
//! name.rs      what a name stands for: a known file, a repository of the hub     known.rs  the names that need no owner
//! settings.rs  where the caches are, the token, the hub's address: the variables of huggingface_hub
//! select.rs    which files of a repository are wanted
//! cache.rs     Hugging Face's layout: blobs by their hash, links by commit        list.rs   what is there
//! fetch.rs     a name to files on the disk: first the caches, then the network
//! download.rs  one file: resumed, checked, renamed into place                     check.rs  its hash
//! hub.rs       what the hub says of a repository and a file
//! ask.rs       one answer: redirects, retries, refusals                           http.rs   the client, on a thread
//! ```
#![forbid(unsafe_code)]

mod ask;
mod cache;
mod check;
mod download;
mod error;
mod fetch;
mod http;
mod hub;
mod known;
mod list;
mod name;
mod select;
mod settings;
mod watch;

pub use error::{Error, Result, WrongContent};
pub use fetch::{Fetched, Fetcher, File};
pub use known::{KNOWN_MODELS, KnownFile};
pub use list::{Listed, list};
pub use name::{Kind, Name, Repo};
pub use select::Wanted;
pub use settings::{Proxies, Settings};
pub use watch::{Progress, Watch};
