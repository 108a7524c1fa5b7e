//! Chosen algorithms on disk: a later run takes the same one, and so computes the same bits.

use super::Problem;
use crate::Cache;
use crate::DeviceInfo;
use crate::cache::{CHOICES, key};
use crate::ffi::cublaslt::Algo;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// An algorithm and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Candidate {
    pub algo: Algo,
    /// Bytes of workspace it needs.
    pub workspace: usize,
    /// Milliseconds; `None` if it was taken unmeasured. Of the best algorithm of a product that was also tried in other ways: together
    /// with the sums of columns that our own kernel spares.
    pub ms: Option<f32>,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ChosenAlgorithm {
    pub best: Candidate,
    /// The next best, best first.
    pub others: Vec<Candidate>,
    /// Milliseconds of the library's first proposal.
    pub first_ms: Option<f32>,
    /// Milliseconds of the plainer product and a kernel for the rest, where that was measured.
    pub rival_ms: Option<f32>,
    /// Milliseconds of our own kernel, where that was measured. An entry from before there was one stays as it is: its bits are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_ms: Option<f32>,
    /// Milliseconds of our own kernel that leaves or takes slopes of GELU, where that was measured. An entry from before there was one stays
    /// as it is, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slopes_ms: Option<f32>,
}

/// What was the fastest way to compute a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fastest {
    /// The library's algorithm.
    Library,
    /// The plainer product and a kernel for the rest.
    Apart,
    /// Our own kernel.
    Own,
}

/// Another way is taken where it needs less than this share of the library's time: two measurements differ by more than nothing.
const CLEARLY: f32 = 0.985;

impl ChosenAlgorithm {
    /// How long the ways to compute it took, in words.
    pub fn compared(&self) -> String {
        let ways = [
            ("the library", self.best.ms),
            ("two kernels", self.rival_ms),
            ("our own kernel", self.own_ms),
            ("our own with slopes", self.slopes_ms),
        ];
        let timed = ways.into_iter().filter_map(|(way, ms)| Some(format!("{way} {:.4} ms", ms?)));
        format!("; compared: {}", timed.collect::<Vec<_>>().join(", "))
    }

    /// Forgets the times of ways that are not clearly faster than the library's. A choice that was made stays what it was, so this is not
    /// done when it is read.
    pub fn settle(&mut self) {
        let most = self.best.ms.map_or(f32::INFINITY, |library| CLEARLY * library);
        for ms in [&mut self.rival_ms, &mut self.own_ms] {
            *ms = ms.filter(|ms| *ms < most);
        }
    }

    /// Milliseconds of what was the fastest, slopes aside; `None` if the library's algorithm was taken unmeasured.
    fn fastest_ms(&self) -> Option<f32> {
        let others = [self.rival_ms, self.own_ms].into_iter().flatten();
        Some(others.fold(self.best.ms?, f32::min))
    }

    /// Whether a forward and its backward are clearly faster together if slopes of GELU pass between them.
    pub fn slopes_are_faster(forward: &Self, backward: &Self) -> bool {
        let sum = |of: fn(&Self) -> Option<f32>| Some(of(forward)? + of(backward)?);
        let both = [sum(|choice| choice.slopes_ms), sum(Self::fastest_ms)];
        matches!(both, [Some(slopes), Some(inputs)] if slopes < CLEARLY * inputs)
    }

    /// What was the fastest; our own kernel only where it may be taken. The library, unless others were measured and one is faster.
    pub fn fastest(&self, own: bool) -> Fastest {
        let others = [(self.rival_ms, Fastest::Apart), (self.own_ms.filter(|_| own), Fastest::Own)];
        let measured = others.into_iter().filter_map(|(ms, way)| Some((ms?, way)));
        let best = measured.min_by(|a, b| a.0.total_cmp(&b.0));
        match (self.best.ms, best) {
            (Some(library), Some((ms, way))) if ms < library => way,
            _ => Fastest::Library,
        }
    }
}

/// Choices handed in, by name. They are those of another run, so everything about them is checked.
#[derive(Clone, Debug, Default)]
pub(crate) struct GivenAlgorithms(BTreeMap<String, ChosenAlgorithm>);

impl GivenAlgorithms {
    /// Adds choices made on this device with this version of the library; warns once about all others.
    pub fn add(&mut self, place: &Place, choices: &[(String, String)]) {
        let mut refused = Vec::new();
        for (name, text) in choices {
            match place.parse(name, text) {
                Some(choice) => drop(self.0.insert(name.clone(), choice)),
                None => refused.push(name.as_str()),
            }
        }
        if let Some(first) = refused.first() {
            tracing::warn!(
                "{} of {} algorithms handed in are not for this device and library ({}), such as `{first}`: they are \
                 chosen anew, and bits may differ",
                refused.len(),
                choices.len(),
                place.0
            );
        }
    }

    /// The choice for a problem.
    pub fn get(&self, place: &Place, problem: &Problem) -> Option<&ChosenAlgorithm> {
        self.0.get(&place.name(problem))
    }

    /// All choices, as they were handed in.
    pub fn all(&self) -> impl Iterator<Item = (String, String)> {
        self.0.iter().filter_map(|(name, choice)| {
            let problem = name.strip_prefix(NAME)?;
            Some((name.clone(), text(problem, choice)?))
        })
    }
}

/// What names of handed-in choices begin with: other libraries may have choices too.
const NAME: &str = "gemm ";

fn text(problem: &str, choice: &ChosenAlgorithm) -> Option<String> {
    let entry = Entry { version: VERSION, problem: problem.into(), choice: choice.clone() };
    serde_json::to_string_pretty(&entry).ok()
}

/// The form of an entry; one of another form is not read.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Entry {
    version: u32,
    /// What the choice is for, in words.
    problem: String,
    choice: ChosenAlgorithm,
}

/// Everything that decides a choice, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place(String);

impl Place {
    /// The place of this device, with this version of the library.
    pub fn new(info: &DeviceInfo, library: usize) -> Self {
        let DeviceInfo { name, compute: (major, minor), sms, .. } = info;
        Self(format!("{name}, sm_{major}{minor}, {sms} SMs, cuBLASLt {library}"))
    }

    fn describe(&self, problem: &Problem) -> String {
        format!("{problem} on {}", self.0)
    }

    /// What a choice is called when it is handed from run to run.
    fn name(&self, problem: &Problem) -> String {
        format!("{NAME}{}", self.describe(problem))
    }

    /// A choice to hand to another run: its name, and the text that is stored.
    pub fn pack(&self, problem: &Problem, choice: &ChosenAlgorithm) -> Option<(String, String)> {
        Some((self.name(problem), text(&self.describe(problem), choice)?))
    }

    /// A choice that was handed in, if it was made in this place and is what its name says.
    fn parse(&self, name: &str, text: &str) -> Option<ChosenAlgorithm> {
        let problem = name.strip_prefix(NAME)?;
        problem.strip_suffix(&self.0)?.strip_suffix(" on ")?;
        let entry: Entry = serde_json::from_str(text).ok()?;
        (entry.version == VERSION && entry.problem == problem).then_some(entry.choice)
    }

    fn entry(&self, problem: &Problem) -> String {
        format!("{CHOICES}{}.json", key(&[&self.describe(problem), &VERSION.to_string()]))
    }

    /// The stored choice, if there is one that reads.
    pub fn read(&self, cache: &Cache, problem: &Problem) -> Option<ChosenAlgorithm> {
        let entry: Entry = serde_json::from_slice(&cache.read(&self.entry(problem))?).ok()?;
        (entry.version == VERSION && entry.problem == self.describe(problem)).then_some(entry.choice)
    }

    /// Keeps a choice; whether that was possible.
    pub fn write(&self, cache: &Cache, problem: &Problem, choice: &ChosenAlgorithm) -> bool {
        let text = text(&self.describe(problem), choice);
        text.is_some_and(|text| cache.write(&self.entry(problem), text.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::problem::{Addresses, Extra, Sizes};
    use super::*;
    use ironhorse_core::DType;

    fn problem() -> Problem {
        let sizes =
            Sizes { rows: 65536, ic: 768, oc: 3072, inputs: DType::BF16, output: DType::BF16, tf32: false };
        Problem::forward(&sizes, &Addresses::default()).extra(Extra::Gelu { bias: true })
    }

    fn place(name: &str, library: usize) -> Place {
        let info = DeviceInfo {
            index: 0,
            name: name.into(),
            compute: (9, 0),
            sms: 132,
            memory: 0,
            l2: 0,
            shared_per_block: 0,
        };
        Place::new(&info, library)
    }

    fn choice() -> ChosenAlgorithm {
        let candidate = |ms| Candidate { algo: [u64::MAX, 1, 2, 3, 4, 5, 6, 7], workspace: 1 << 25, ms };
        let others = vec![candidate(Some(0.25)), candidate(None)];
        ChosenAlgorithm {
            best: candidate(Some(0.1)),
            others,
            first_ms: Some(0.3),
            rival_ms: None,
            own_ms: None,
            slopes_ms: None,
        }
    }

    #[test]
    fn choices_come_back_for_the_same_problem_and_place_only() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(Some(folder.path()));
        let here = place("H200", 130_100);
        assert_eq!(here.read(&cache, &problem()), None);
        here.write(&cache, &problem(), &choice());
        assert_eq!(here.read(&cache, &problem()), Some(choice()));
        assert_eq!(place("H100", 130_100).read(&cache, &problem()), None);
        assert_eq!(place("H200", 130_200).read(&cache, &problem()), None);
        assert_eq!(here.read(&cache, &problem().extra(Extra::Bias)), None);
        assert_eq!(here.read(&cache, &problem().adds(true)), None);
    }

    #[test]
    fn an_entry_that_is_not_ours_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(Some(folder.path()));
        let here = place("H200", 130_100);
        cache.write(&here.entry(&problem()), b"{\"version\": 1}");
        assert_eq!(here.read(&cache, &problem()), None);
        here.write(&cache, &problem(), &choice());
        let path = folder.path().join(here.entry(&problem()));
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[20] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(here.read(&cache, &problem()), None);
    }

    #[test]
    fn another_way_has_to_be_clearly_faster_when_it_is_chosen() {
        let timed = |rival, own| ChosenAlgorithm {
            best: Candidate { ms: Some(1.0), ..choice().best },
            rival_ms: Some(rival),
            own_ms: Some(own),
            ..choice()
        };
        for (rival, own, way) in [
            (0.99, 0.99, Fastest::Library),
            (0.98, 0.99, Fastest::Apart),
            (0.99, 0.98, Fastest::Own),
            (0.97, 0.98, Fastest::Apart),
        ] {
            let mut made = timed(rival, own);
            // a choice that is read is taken as it is
            assert_ne!(made.fastest(true), Fastest::Library, "{rival} {own}");
            made.settle();
            assert_eq!(made.fastest(true), way, "{rival} {own}");
        }
    }

    #[test]
    fn slopes_pass_where_both_products_together_are_clearly_faster() {
        let timed = |library, own, slopes| ChosenAlgorithm {
            best: Candidate { ms: library, ..choice().best },
            own_ms: own,
            slopes_ms: slopes,
            ..choice()
        };
        let forward = timed(Some(0.64), Some(0.63), Some(0.74));
        let backward = timed(Some(0.75), None, Some(0.56));
        assert!(ChosenAlgorithm::slopes_are_faster(&forward, &backward), "1.30 against 1.38 ms");
        assert!(!ChosenAlgorithm::slopes_are_faster(&forward, &timed(Some(0.75), Some(0.68), Some(0.56))));
        assert!(
            !ChosenAlgorithm::slopes_are_faster(&forward, &timed(Some(0.75), None, Some(0.63))),
            "not clearly"
        );
        // an entry from before slopes were timed, and one that was never timed
        assert!(!ChosenAlgorithm::slopes_are_faster(&forward, &timed(Some(9.0), None, None)));
        assert!(!ChosenAlgorithm::slopes_are_faster(&timed(None, None, Some(0.1)), &backward));
        let text = serde_json::to_string(&choice()).unwrap();
        assert!(!text.contains("slopes_ms"), "an entry without is what it was: {text}");
        assert_eq!(serde_json::from_str::<ChosenAlgorithm>(&text).unwrap(), choice());
    }

    #[test]
    fn handed_in_choices_are_those_of_the_run_before() {
        let (here, beaten) = (place("H200", 130_100), ChosenAlgorithm { rival_ms: Some(0.01), ..choice() });
        let plain = problem().extra(Extra::Bias);
        let mut packed = vec![here.pack(&problem(), &beaten).unwrap(), here.pack(&plain, &choice()).unwrap()];
        let mut given = GivenAlgorithms::default();
        given.add(&here, &packed);
        assert_eq!(given.get(&here, &problem()), Some(&beaten), "that two kernels were faster is part of it");
        assert_eq!(given.get(&here, &plain), Some(&choice()));
        assert_eq!(given.get(&here, &problem().adds(true)), None);
        packed.sort();
        assert_eq!(given.all().collect::<Vec<_>>(), packed, "the same texts, sorted by name");
        // What is handed on is what is stored.
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(Some(folder.path()));
        assert!(here.write(&cache, &plain, &choice()));
        let stored = String::from_utf8(cache.read(&here.entry(&plain)).unwrap()).unwrap();
        assert_eq!(here.pack(&plain, &choice()).unwrap().1, stored);
    }

    #[test]
    fn choices_of_another_place_or_form_are_left_out() {
        let here = place("H200", 130_100);
        let (name, text) = here.pack(&problem(), &choice()).unwrap();
        for other in [place("H100", 130_100), place("H200", 130_200)] {
            let mut given = GivenAlgorithms::default();
            given.add(&here, &[other.pack(&problem(), &choice()).unwrap()]);
            assert!(given.0.is_empty());
            // Renamed to this place, it still says what it is for.
            given.add(&here, &[(name.clone(), other.pack(&problem(), &choice()).unwrap().1)]);
            assert!(given.0.is_empty());
        }
        let version = text.replace("\"version\": 1", "\"version\": 2");
        assert_ne!(version, text);
        let bare = name.strip_prefix(NAME).unwrap();
        for (name, text) in
            [(&*name, &*version), (&name, ""), (&name, "{}"), (bare, &text), ("gemm ", &text), ("", &text)]
        {
            assert_eq!(here.parse(name, text), None, "{name}: {text}");
        }
        assert_eq!(here.parse(&name, &text), Some(choice()));
    }

    #[test]
    fn names_stay_the_same() {
        // A change here invalidates every stored choice; VERSION must change with it.
        let text = place("H200", 130_100).describe(&problem());
        assert_eq!(text, "3072x65536x768 TN bf16->bf16 +bias+gelu on H200, sm_90, 132 SMs, cuBLASLt 130100");
    }

    #[test]
    fn others_must_be_faster_than_the_library_to_win() {
        use Fastest::{Apart, Library, Own};
        let fastest = |rival_ms, own_ms, may| ChosenAlgorithm { rival_ms, own_ms, ..choice() }.fastest(may);
        assert_eq!(fastest(None, None, true), Library);
        assert_eq!(fastest(Some(0.1), Some(0.1), true), Library);
        assert_eq!(fastest(Some(0.09), None, true), Apart);
        assert_eq!(fastest(Some(0.09), Some(0.08), true), Own);
        assert_eq!(fastest(Some(0.09), Some(0.08), false), Apart, "our own may not be taken");
        assert_eq!(fastest(None, Some(0.08), false), Library);
        assert_eq!(fastest(Some(0.08), Some(0.09), true), Apart);
        let unmeasured = Candidate { ms: None, ..choice().best };
        assert_eq!(
            ChosenAlgorithm { best: unmeasured, own_ms: Some(0.01), ..choice() }.fastest(true),
            Library
        );
    }

    #[test]
    fn entries_without_a_time_of_our_own_kernel_are_read() {
        let place = place("H200", 130_100);
        let (name, text) = place.pack(&problem(), &choice()).unwrap();
        assert!(!text.contains("own_ms"), "what was stored before there was such a time");
        assert_eq!(place.parse(&name, &text), Some(choice()));
        let own = ChosenAlgorithm { own_ms: Some(0.05), ..choice() };
        let (name, text) = place.pack(&problem(), &own).unwrap();
        assert_eq!(place.parse(&name, &text), Some(own));
    }
}
