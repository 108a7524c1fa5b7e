//! Which runs there are, and what is known of them.
//!
//! Clients name runs, never paths: a name is looked up in the list that this makes, so nothing else can be read.

use crate::error::{ApiError, quoted};
use hyper::StatusCode;
use ironhorse_train::run::view::{Life, Loads, Quantity, RunView};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Names and texts: what is to be said of a run.
pub type Facts = Vec<(String, String)>;
/// Says facts about a run.
pub type Says = Box<dyn Fn(&RunView) -> Facts + Send + Sync>;

/// What is said of a run in words, the same as in the terminal.
pub struct Words {
    /// Says whether a run goes on.
    pub state: Box<dyn Fn(&RunView) -> String + Send + Sync>,
    /// Says the figures of a run.
    pub facts: Says,
    /// Says the settings of a run.
    pub settings: Says,
}

/// A run in the list.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// What clients call it.
    pub name: String,
    /// When its log was written last, in seconds since 1970.
    pub written: f64,
    #[serde(skip)]
    path: PathBuf,
}

/// Time between two looks at the files of a run.
const LOOK_EVERY: Duration = Duration::from_millis(900);
/// A run that nobody asks for is forgotten after this time.
const FORGET: Duration = Duration::from_secs(600);
/// The most of a sample, or of a profile, that is read.
const MOST_OF_SAMPLE: u64 = 1 << 20;
const MOST_OF_PROFILE: u64 = 64 << 20;
/// The log of a run, and what `ironhorse profile --json` may have written beside it.
const METRICS: &str = "metrics.jsonl";
const PROFILE: &str = "profile.json";

/// The runs.
pub struct Shelf {
    /// The folder whose runs are shown; those that are given otherwise.
    folder: Option<PathBuf>,
    given: Vec<Listed>,
    words: Words,
    open: Mutex<HashMap<String, Arc<Mutex<Run>>>>,
}

impl Shelf {
    /// The runs below a folder, whichever there are at the time.
    pub fn below(folder: PathBuf, words: Words) -> Self {
        Self { folder: Some(folder), given: Vec::new(), words, open: Mutex::default() }
    }

    /// A shelf with these runs and no others.
    pub fn of(paths: &[PathBuf], words: Words) -> Result<Self, ironhorse_train::Error> {
        let shelf = Self { folder: None, given: Vec::new(), words, open: Mutex::default() };
        let (mut given, mut open): (Vec<Listed>, HashMap<_, _>) = (Vec::new(), HashMap::new());
        for (i, path) in paths.iter().enumerate() {
            if paths[..i].contains(path) {
                continue;
            }
            let view = RunView::open(path)?;
            let mut name = view.name();
            if given.iter().any(|one| one.name == name) {
                name = path.display().to_string();
            }
            given.push(Listed { name: name.clone(), written: seconds(written(path)), path: path.clone() });
            open.insert(name, Arc::new(Mutex::new(Run::new(view))));
        }
        Ok(Self { given, open: Mutex::new(open), ..shelf })
    }

    /// The runs there are, the newest first.
    pub fn names(&self) -> Vec<Listed> {
        let mut all = match &self.folder {
            None => self
                .given
                .iter()
                .map(|one| Listed { written: seconds(written(&one.path)), ..one.clone() })
                .collect(),
            Some(folder) => runs_below(folder),
        };
        all.sort_by(|a, b| b.written.total_cmp(&a.written).then_with(|| a.name.cmp(&b.name)));
        all
    }

    /// A run, as it is now.
    pub fn open(&self, name: &str) -> Result<Held, ApiError> {
        let known = lock(&self.open).get(name).cloned();
        let run = match known {
            Some(run) => run,
            None => self.read(name)?,
        };
        let gone = {
            let mut run = lock(&run);
            run.used = Instant::now();
            run.look().err()
        };
        if let Some(error) = gone {
            lock(&self.open).remove(name);
            return Err(ApiError::new(StatusCode::NOT_FOUND, Some("unreadable"), error.to_string()));
        }
        Ok(Held(run))
    }

    fn read(&self, name: &str) -> Result<Arc<Mutex<Run>>, ApiError> {
        let Some(found) = self.names().into_iter().find(|one| one.name == name) else {
            let name = quoted(name);
            let message = format!("{name} is not a run that is shown here; /api/runs lists them");
            return Err(ApiError::new(StatusCode::NOT_FOUND, Some("unknown_run"), message));
        };
        let unreadable = |error: ironhorse_train::Error| {
            ApiError::new(StatusCode::NOT_FOUND, Some("unreadable"), error.to_string())
        };
        let run = Arc::new(Mutex::new(Run::new(RunView::open(&found.path).map_err(unreadable)?)));
        let mut open = lock(&self.open);
        open.retain(|_, run| run.try_lock().map_or(true, |run| run.used.elapsed() < FORGET));
        Ok(open.entry(name.to_owned()).or_insert(run).clone())
    }
}

/// A run that is open; others can look at it, too.
pub struct Held(Arc<Mutex<Run>>);

impl Held {
    /// What is known of it, for one reader at a time.
    pub fn lock(&self) -> MutexGuard<'_, Run> {
        lock(&self.0)
    }

    /// Everything but the curves.
    pub fn told(&self, shelf: &Shelf) -> Value {
        self.lock().told(&shelf.words)
    }
}

/// What is known of a run.
pub struct Run {
    /// Its log and its folder.
    pub view: RunView,
    /// Rises with every change.
    pub version: u64,
    looked: Instant,
    used: Instant,
    /// The profile of a step, and when it was written.
    profile: (Option<SystemTime>, Value),
}

impl Run {
    fn new(view: RunView) -> Self {
        let now = Instant::now();
        let mut run = Self { view, version: 1, looked: now, used: now, profile: (None, Value::Null) };
        run.read_profile();
        run
    }

    /// Reads what is new, at most once in a while.
    fn look(&mut self) -> Result<(), ironhorse_train::Error> {
        if self.looked.elapsed() < LOOK_EVERY {
            return Ok(());
        }
        let changed = self.view.refresh()? | self.read_profile();
        self.version += u64::from(changed);
        self.looked = Instant::now();
        Ok(())
    }

    /// Reads the profile of a step if it is new; gives whether it is.
    fn read_profile(&mut self) -> bool {
        let path = self.view.path().join(PROFILE);
        let written = fs::metadata(&path).and_then(|meta| meta.modified()).ok();
        if written == self.profile.0 {
            return false;
        }
        let bytes = self.read_inside(&path, MOST_OF_PROFILE);
        let said = bytes.and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok()).unwrap_or_default();
        let group = |name: &str| -> Vec<Value> {
            let groups = said[name].as_array().into_iter().flatten();
            groups
                .map(|one| json!({"name": one["name"], "ms": one["ms"], "of_possible": one["of_possible"]}))
                .collect()
        };
        let layers = group("by_layer");
        let shown = match layers.is_empty() {
            true => Value::Null,
            false => json!({
                "model": said["model"], "device": said["device"], "dtype": said["dtype"], "batch": said["batch"], "seq": said["seq"],
                "ms": said["ms"], "layers": layers, "ops": group("by_kind"),
            }),
        };
        self.profile = (written, shown);
        true
    }

    /// A file that is inside of the run's folder, also after links are followed; at most this many bytes of it.
    fn read_inside(&self, path: &Path, most: u64) -> Option<Vec<u8>> {
        let (folder, path) = (fs::canonicalize(self.view.path()).ok()?, fs::canonicalize(path).ok()?);
        let file = path.starts_with(folder).then(|| File::open(path).ok())??;
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// The sample after this many steps; the newest without a number.
    pub fn sample(&self, step: Option<u64>) -> Result<Value, ApiError> {
        let samples = &self.view.samples;
        let found = match step {
            Some(step) => samples.iter().find(|one| one.0 == step),
            None => samples.last(),
        };
        let text = found.and_then(|(step, path)| Some((*step, self.read_inside(path, MOST_OF_SAMPLE)?)));
        let Some((step, bytes)) = text else {
            let message = format!("{} has no such sample", self.view.name());
            return Err(ApiError::new(StatusCode::NOT_FOUND, Some("unknown_sample"), message));
        };
        Ok(json!({"step": step, "text": String::from_utf8_lossy(&bytes)}))
    }

    fn told(&self, words: &Words) -> Value {
        let (view, table) = (&self.view, &self.view.table);
        let quantities: Vec<&str> =
            Quantity::ALL.into_iter().filter(|one| table.last(*one).is_some()).map(Quantity::key).collect();
        let router: Vec<Vec<f64>> =
            table.router.iter().map(|layer| layer.load.iter().copied().map(short).collect()).collect();
        json!({
            "version": self.version,
            "state": (words.state)(view),
            "running": matches!(view.life, Life::Process(_)),
            "made": view.made(),
            "steps": view.setting("steps"),
            "first": table.steps.first(),
            "last": table.val.last().map(|one| one.0).max(table.steps.last().copied()),
            "quantities": quantities,
            "facts": (words.facts)(view),
            "settings": (words.settings)(view),
            "samples": view.samples.iter().map(|one| one.0).collect::<Vec<_>>(),
            "checkpoints": view.checkpoints,
            "router": router,
            "profile": self.profile.1,
        })
    }
}

/// The load of the experts of a layer over the steps: of each span its first step and the mean shares.
pub fn loads(loads: &Loads, layer: u64) -> Result<Value, ApiError> {
    let layers = loads.layers();
    let Some(layer) = usize::try_from(layer).ok().filter(|layer| *layer < layers) else {
        let message = format!("layer is {layer}, expected less than {layers}, the layers with experts");
        return Err(ApiError::param("layer", message));
    };
    let (steps, shares): (Vec<u64>, Vec<Vec<f64>>) = loads
        .of_layer(layer)
        .into_iter()
        .map(|(step, shares)| (step, shares.into_iter().map(short).collect()))
        .unzip();
    Ok(json!({"layer": layer, "layers": layers, "width": loads.width, "steps": steps, "shares": shares}))
}

/// Five digits are more than a colour shows.
fn short(load: f32) -> f64 {
    f64::from((load * 1e5).round()) / 1e5
}

/// The runs of a folder. A link that leads out of it is not one of them.
fn runs_below(folder: &Path) -> Vec<Listed> {
    let Ok(root) = fs::canonicalize(folder) else { return Vec::new() };
    let entries = fs::read_dir(&root).into_iter().flatten().flatten();
    let listed = entries.filter_map(|entry| {
        let path = fs::canonicalize(entry.path()).ok().filter(|path| path.starts_with(&root))?;
        let log = fs::canonicalize(path.join(METRICS)).ok().filter(|log| log.starts_with(&path))?;
        let written = seconds(fs::metadata(log).ok()?.modified().ok());
        Some(Listed { name: entry.file_name().to_string_lossy().into_owned(), written, path })
    });
    listed.collect()
}

fn written(run: &Path) -> Option<SystemTime> {
    fs::metadata(run.join(METRICS)).and_then(|meta| meta.modified()).ok()
}

fn seconds(time: Option<SystemTime>) -> f64 {
    time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0.0, |time| time.as_secs_f64())
}

/// A thread that panicked while it read leaves a run that can still be looked at.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
