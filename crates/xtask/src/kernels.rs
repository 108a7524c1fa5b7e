//! `cargo xtask kernels`: every kernel compiled for every architecture, without a GPU.

use crate::args::{Args, unknown};
use crate::counts::{Counts, KERNELS_LINE};
use crate::kernel_table::Build;
use crate::ptxas::{self, Resources};
use crate::python::fingerprint;
use crate::repo::Repo;
use crate::{kernel_table, out};
use anyhow::{Context, Result, bail, ensure};
use ironhorse_cuda::ffi::library::{NVRTC, PATH_VARIABLE};
use ironhorse_cuda::ffi::nvrtc::Nvrtc;
use ironhorse_cuda::{Cache, KERNEL_FILES, Spec, check_specs, covering};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Help of `cargo xtask kernels`.
pub const HELP: &str = "\
Compiles the CUDA kernels with NVRTC, for sm_80 and sm_90a, and prints the registers, shared memory and spills of each
kernel. Needs no GPU. Every file is compiled with every value of each of its constants; with --all or --arch, with every
combination that the engine uses. Fails if a kernel does not compile, or if it spills registers and is not on the list of
exceptions. Kernels that did not change since the last run are not compiled again.

Usage: cargo xtask kernels [--all | --arch ARCH]... [--verbose] [--json FILE]

  --all         every combination, for all six architectures
  --arch ARCH   every combination, for this architecture; may be given several times
  --verbose     one row for each build instead of the worst build of each kernel
  --json FILE   every build of every kernel

NVRTC is loaded from .venv (see cargo xtask setup), or from the folder in IRONHORSE_CUDA_PATH.

Example: cargo xtask kernels --arch sm_90a --verbose";

/// The architectures that the engine supports.
const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"];
/// The two architectures whose code differs most: the oldest, without TMA and wgmma, and the one of the benchmarks.
const DEFAULT: [&str; 2] = ["sm_80", "sm_90a"];

/// Allowed spills: kernel, architecture, bytes at most. Any other spill is a failure. The register allocator for sm_120 spills a few
/// bytes here; `grouped_fp8_swiglu` has 128 registers for each of 512 threads, and is faster so than its product and SwiGLU in two
/// kernels (2.03 against 2.21 ms for a layer of the 6.9B: docs/log.md).
const MAY_SPILL: &[(&str, &str, u32)] = &[
    ("cross_entropy_bwd", "sm_120", 16),
    ("grouped_fp8_swiglu", "sm_90a", 88),
    ("norm_bwd", "sm_120", 16),
    ("softmax_held", "sm_120", 32),
];

struct Options {
    architectures: Vec<String>,
    /// Whether every combination of constants is compiled, rather than every value of each.
    combinations: bool,
    verbose: bool,
    json: Option<PathBuf>,
}

/// `cargo xtask kernels`
pub fn run(repo: &Repo, args: Args) -> Result<bool> {
    let args = args.rest();
    let options = parse(Args::new(args.clone()))?;
    if std::env::var_os(PATH_VARIABLE).is_none() {
        // The search path of libraries comes from the environment, which only a new process can change.
        let mut again = command(repo)?;
        let status = again.args(args).status().context("cannot start this program again")?;
        ensure!(status.code() != Some(2), "the kernels could not be checked (the reason is above)");
        return Ok(status.success());
    }
    check(repo, &options)
}

/// The command that runs this program again, with the NVRTC of `.venv` unless the environment names another.
pub fn command(repo: &Repo) -> Result<Command> {
    let mut again = repo.xtask();
    again.arg("kernels");
    if std::env::var_os(PATH_VARIABLE).is_none() {
        let folder = repo.site_packages().into_iter().find_map(|site| {
            let mut folders = NVRTC.pip_folders.iter().map(|below| site.join(below));
            folders.find(|folder| NVRTC.files.iter().any(|file| folder.join(file).exists()))
        });
        again.env(PATH_VARIABLE, folder.context("there is no NVRTC in .venv: cargo xtask setup")?);
    }
    Ok(again)
}

fn parse(mut args: Args) -> Result<Options> {
    let mut options = Options { architectures: Vec::new(), combinations: true, verbose: false, json: None };
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--arch" => options.architectures.push(args.value("--arch")?),
            "--all" => options.architectures.extend(ARCHITECTURES.map(String::from)),
            "--verbose" => options.verbose = true,
            "--json" => options.json = Some(args.value("--json")?.into()),
            _ => return unknown(&arg),
        }
    }
    if let Some(other) = options.architectures.iter().find(|arch| !arch.starts_with("sm_")) {
        bail!("--arch is '{other}', expected one such as {}", ARCHITECTURES.join(", "));
    }
    if options.architectures.is_empty() {
        options.architectures = DEFAULT.map(String::from).into();
        options.combinations = false;
    }
    Ok(options)
}

fn check(repo: &Repo, options: &Options) -> Result<bool> {
    let nvrtc = Nvrtc::load()?;
    let (major, minor) = nvrtc.version()?;
    let version = format!("{major}.{minor}");
    let all = check_specs();
    ensure!(!all.is_empty(), "there are no kernels: ironhorse_cuda::check_specs() is empty");
    let specs = if options.combinations { all.clone() } else { covering(&all) };
    out::line(format!(
        "{} of {} specialisations for {}, NVRTC {version}",
        specs.len(),
        all.len(),
        options.architectures.join(" ")
    ));
    let cache = Cache::open(Some(&repo.target()?.join("kernels")));
    let builds = build_all(&specs, &options.architectures, |spec, arch| {
        build(spec, arch, &version, &cache, |spec, arch| Ok(spec.compile(&nvrtc, arch)?.log))
    });
    let new = builds.iter().filter(|build| build.seconds.is_some()).count();
    out::line(format!("{new} compiled, {} unchanged\n", builds.len() - new));
    out::line(if options.verbose { kernel_table::all(&builds) } else { kernel_table::worst(&builds) });
    let warnings: BTreeSet<_> =
        builds.iter().flat_map(|build| build.warnings.iter().map(|text| (build.file, text))).collect();
    warnings.iter().for_each(|(file, text)| out::line(format!("{file}: {text}")));
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&kernel_table::json(&builds, &version))?;
        std::fs::write(path, text).with_context(|| format!("{}: cannot write", path.display()))?;
    }
    let faults = faults(&builds, MAY_SPILL);
    failures(&builds, &faults).into_iter().for_each(out::line);
    let failed = faults.iter().map(|(build, _)| build).collect::<BTreeSet<_>>().len();
    let counts = Counts { passed: builds.len() - failed, failed, ..Counts::default() };
    out::line(format!("\n{KERNELS_LINE}{counts}"));
    Ok(failed == 0)
}

/// What a build without any kernel fails with.
const NO_REPORT: &str = "contains no kernel, or NVRTC reports none";

/// Compiles every specialisation for every architecture on all cores: NVRTC can compile programs in parallel. On many cores it now and
/// then loses the report of a short build, so builds without one are compiled again, alone.
fn build_all(
    specs: &[Spec],
    architectures: &[String],
    build: impl Fn(&Spec, &str) -> Build + Sync,
) -> Vec<Build> {
    let jobs: Vec<(&Spec, &String)> =
        specs.iter().flat_map(|spec| architectures.iter().map(move |arch| (spec, arch))).collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(jobs.len())));
    let threads = std::thread::available_parallelism().map_or(2, usize::from).max(2);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((i, (spec, arch))) = take(&next, &jobs) {
                    let one = build(spec, arch);
                    done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((i, one));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.sort_by_key(|(i, _)| *i);
    for (i, one) in &mut done {
        if one.outcome.as_ref().is_err_and(|error| error == NO_REPORT) {
            *one = build(jobs[*i].0, jobs[*i].1);
        }
    }
    done.into_iter().map(|(_, build)| build).collect()
}

fn take<T: Copy>(next: &AtomicUsize, jobs: &[T]) -> Option<(usize, T)> {
    let i = next.fetch_add(1, Ordering::Relaxed);
    jobs.get(i).map(|&job| (i, job))
}

/// One build; its log comes from the cache if none of its inputs has changed.
fn build(
    spec: &Spec,
    arch: &str,
    version: &str,
    cache: &Cache,
    compile: impl Fn(&Spec, &str) -> ironhorse_cuda::Result<String>,
) -> Build {
    let defines: Vec<String> = spec.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let defines = defines.join(" ");
    let key = key(spec.file, &[&spec.flags().join(" "), arch, version]);
    let entry = format!("{}-{arch}-{key}.log", spec.file.trim_end_matches(".cu").replace('/', "-"));
    let kept = cache.read(&entry).and_then(|log| String::from_utf8(log).ok());
    let started = kept.is_none().then(Instant::now);
    let log = match kept {
        Some(log) => Ok(log),
        None => compile(spec, arch).map_err(|error| match error {
            ironhorse_cuda::Error::Compile { log, .. } => format!("does not compile:\n{log}"),
            other => other.to_string(),
        }),
    };
    let seconds = started.map(|at| at.elapsed().as_secs_f64());
    let warnings = ptxas::warnings(log.as_deref().unwrap_or("")).map(str::to_owned).collect();
    let outcome = log.and_then(|log| match ptxas::kernels(&log) {
        found if found.is_empty() => Err(NO_REPORT.into()),
        found => {
            cache.write(&entry, log.as_bytes());
            Ok(found)
        }
    });
    Build { file: spec.file, defines, arch: arch.to_owned(), outcome, warnings, seconds }
}

/// A key of everything that affects the device code.
fn key(file: &str, parts: &[&str]) -> String {
    let texts = KERNEL_FILES.iter().filter(|(name, _)| *name == file || name.ends_with(".cuh"));
    let mut all: Vec<&str> = texts.map(|(_, text)| *text).collect();
    all.push(file);
    all.extend(parts);
    fingerprint(&all)
}

/// The faults, each with the index of its build.
fn faults(builds: &[Build], may_spill: &[(&str, &str, u32)]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (i, build) in builds.iter().enumerate() {
        match &build.outcome {
            Err(error) => found.push((i, error.clone())),
            Ok(kernels) => {
                let allowed = |kernel: &Resources| {
                    may_spill.iter().any(|&(name, arch, bytes)| {
                        name == kernel.kernel && arch == build.arch && kernel.spill_stores <= bytes
                    })
                };
                let spilling = kernels.iter().filter(|kernel| kernel.spills() && !allowed(kernel));
                found.extend(spilling.map(|kernel| {
                    let (stores, loads) = (kernel.spill_stores, kernel.spill_loads);
                    (i, format!("{} spills registers: {stores} bytes stored, {loads} loaded", kernel.kernel))
                }));
            }
        }
    }
    found
}

/// One text for each distinct fault of a file, with the first build that has it: often all builds have the same error.
fn failures(builds: &[Build], faults: &[(usize, String)]) -> Vec<String> {
    let mut groups: Vec<(&Build, &str, usize)> = Vec::new();
    for (i, what) in faults {
        let build = &builds[*i];
        match groups.iter_mut().find(|(first, text, _)| first.file == build.file && text == what) {
            Some((_, _, count)) => *count += 1,
            None => groups.push((build, what, 1)),
        }
    }
    let shown = |(build, what, count): (&Build, &str, usize)| {
        let others = if count > 1 { format!(" and {} others", count - 1) } else { String::new() };
        let defines = if build.defines.is_empty() { String::new() } else { format!(" {}", build.defines) };
        format!("FAILED {}{defines} for {}{others}: {what}", build.file, build.arch)
    };
    groups.into_iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "Compiling entry function 'f' for 'x'\n0 bytes stack frame, 0 bytes spill stores, 0 bytes spill \
                        loads\nUsed 9 registers";
    const SPILLS: &str = "Compiling entry function 'g' for 'x'\n8 bytes stack frame, 8 bytes spill stores, 4 bytes spill \
                          loads\nUsed 255 registers";

    /// Builds in which `a.cu` is good, `b.cu` spills, `c.cu` does not compile, `d.cu` has no kernel and `e.cu` no report at first.
    fn builds(cache: &Cache, compiled: &Mutex<Vec<(&'static str, String)>>) -> Vec<Build> {
        let specs = ["a.cu", "b.cu", "c.cu", "d.cu", "e.cu"].map(|file| Spec::new(file).define("C", 768));
        build_all(&specs, &["sm_80".into(), "sm_90a".into()], |spec, arch| {
            build(spec, arch, "13.0", cache, |spec, arch| {
                compiled.lock().unwrap().push((spec.file, arch.to_owned()));
                let times = compiled
                    .lock()
                    .unwrap()
                    .iter()
                    .filter(|one| **one == (spec.file, arch.to_owned()))
                    .count();
                match spec.file {
                    "a.cu" => Ok(GOOD.into()),
                    "e.cu" if times > 1 => Ok(GOOD.into()),
                    "b.cu" => Ok(SPILLS.into()),
                    "c.cu" => Err(ironhorse_cuda::Error::Compile {
                        file: "c.cu".into(),
                        arch: arch.into(),
                        log: "line 3".into(),
                    }),
                    _ => Ok(String::new()),
                }
            })
        })
    }

    #[test]
    fn spills_and_errors_are_faults_and_only_good_builds_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(Some(folder.path()));
        let compiled = Mutex::new(Vec::new());
        let first = builds(&cache, &compiled);
        assert_eq!(compiled.lock().unwrap().len(), 10 + 4, "d.cu and e.cu are compiled again");
        let faulty = faults(&first, &[]);
        assert_eq!(faulty.iter().map(|(i, _)| *i).collect::<Vec<_>>(), [2, 3, 4, 5, 6, 7]);
        assert_eq!(
            failures(&first, &faulty),
            [
                "FAILED b.cu C=768 for sm_80 and 1 others: g spills registers: 8 bytes stored, 4 loaded",
                "FAILED c.cu C=768 for sm_80 and 1 others: does not compile:\nline 3",
                "FAILED d.cu C=768 for sm_80 and 1 others: contains no kernel, or NVRTC reports none",
            ]
        );
        let again = builds(&cache, &compiled);
        assert_eq!(compiled.lock().unwrap().len(), 14 + 6, "a.cu, b.cu and e.cu are not compiled again");
        assert_eq!(faults(&again, &[("g", "sm_80", 8)]).len(), 5, "g may spill 8 bytes for sm_80");
        assert_eq!(faults(&again, &[("g", "sm_80", 7)]).len(), 6, "g may not spill more than allowed");
        assert_eq!(again.iter().filter(|build| build.seconds.is_none()).count(), 6);
    }

    #[test]
    fn keys_depend_on_every_part() {
        let all =
            [key("a.cu", &["C=1", "sm_80"]), key("a.cu", &["C=1", "sm_90a"]), key("b.cu", &["C=1", "sm_80"])];
        assert!(all[0] != all[1] && all[0] != all[2]);
        assert_eq!(all[0], key("a.cu", &["C=1", "sm_80"]));
    }

    #[test]
    fn flags_are_read() {
        let parsed = |text: &str| parse(Args::new(text.split_whitespace().map(str::to_owned)));
        assert_eq!(parsed("").unwrap().architectures, DEFAULT);
        assert_eq!(parsed("--all").unwrap().architectures, ARCHITECTURES);
        let options = parsed("--arch sm_90a --verbose --json k.json").unwrap();
        assert_eq!((options.architectures, options.verbose), (vec!["sm_90a".to_owned()], true));
        assert_eq!(options.json, Some("k.json".into()));
        for (text, want) in [
            ("--arch hopper", "--arch is 'hopper', expected one such as sm_80,"),
            ("--arch", "--arch needs a value"),
            ("--fast", "unknown argument '--fast'"),
        ] {
            let error = parsed(text).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.starts_with(want), "{text}: {error}");
        }
    }
}
