//! What the hub says: the files of a repository at a revision, and the facts of one file.

use crate::ask::{Asker, Patience, Question, encode};
use crate::cache::{is_inside, is_plain_name};
use crate::http::Failure;
use crate::watch::{Progress, Watch};
use crate::{Error, Repo, Result, Settings};
use serde::{Deserialize, Serialize};

/// The most bytes of a list of files.
const LONGEST_LIST: usize = 64 << 20;
/// The progress of a download before sizes are known.
pub const NOTHING: Progress<'static> = Progress { file: "", done: 0, total: 0 };

/// The files of a repository at a commit.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Listing {
    /// The commit.
    pub commit: String,
    /// The paths of all files.
    pub files: Vec<String>,
}

/// What the hub says of a file.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The hash it is named by.
    pub etag: String,
    /// Its size.
    pub size: Option<u64>,
}

/// The address at which a file can be downloaded.
pub fn address(settings: &Settings, repo: &Repo, commit: &str, file: &str) -> String {
    format!("{}/{}/resolve/{}/{}", settings.endpoint, repo.page(), encode(commit, false), encode(file, true))
}

/// Asks for the files of a repository.
pub fn listing(asker: &Asker<'_>, repo: &Repo, watch: &mut dyn Watch) -> Result<Listing> {
    #[derive(Deserialize)]
    struct Sibling {
        rfilename: String,
    }
    #[derive(Deserialize)]
    struct Info {
        sha: String,
        #[serde(default)]
        siblings: Vec<Sibling>,
    }
    let (kind, revision) = (repo.kind.plural(), encode(&repo.revision, false));
    let url = format!("{}/api/{kind}/{}/revision/{revision}", asker.settings.endpoint, repo.id);
    let what = repo.text();
    let ask = Question { what: &what, repo: Some(repo), url: &url, from: 0, facts: false, progress: NOTHING };
    let wrong = |problem: String| Error::Server { what: what.clone(), problem, address: url.clone() };
    let mut patience = Patience::default();
    let bytes = loop {
        let answer = asker.answer(&ask, &mut patience, watch)?;
        let mut stop = || watch.progress(NOTHING).is_break();
        match answer.all(LONGEST_LIST, &mut stop) {
            Ok(bytes) => break bytes,
            Err(Failure::Stopped) => return Err(Error::Stopped),
            Err(Failure::Lost(why)) => patience.wait(&ask, &why, None, watch)?,
            Err(Failure::Unreachable(why)) => return Err(wrong(why)),
        }
    };
    let info: Info = serde_json::from_slice(&bytes).map_err(|error| {
        wrong(format!("the answer is not a list of files ({error}); is HF_ENDPOINT a hub?"))
    })?;
    let files: Vec<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
    if !is_plain_name(&info.sha) {
        return Err(wrong(format!("{:?} is not a commit", info.sha)));
    }
    match files.iter().find(|file| !is_inside(file)) {
        Some(file) => Err(wrong(format!("it lists {file:?}, which is not a path inside a folder"))),
        None => Ok(Listing { commit: info.sha, files }),
    }
}

/// Asks for the hash and the size of a file.
pub fn facts(
    asker: &Asker<'_>,
    repo: &Repo,
    (commit, file): (&str, &str),
    watch: &mut dyn Watch,
) -> Result<Facts> {
    let what = format!("{}: {file}", repo.text());
    let url = address(asker.settings, repo, commit, file);
    let ask = Question { what: &what, repo: Some(repo), url: &url, from: 0, facts: true, progress: NOTHING };
    let answer = asker.answer(&ask, &mut Patience::default(), watch)?;
    let etag = answer.header("x-linked-etag").or_else(|| answer.header("etag")).unwrap_or_default();
    let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
    if !is_plain_name(&etag) {
        let problem = format!("the server names no usable ETag ({etag:?}); is HF_ENDPOINT a hub?");
        return Err(Error::Server { what, problem, address: url });
    }
    let length = answer.header("content-length").filter(|_| answer.status == 200);
    let size = answer.header("x-linked-size").or(length).and_then(|text| text.parse().ok());
    Ok(Facts { etag, size })
}
