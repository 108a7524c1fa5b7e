//! What a source includes: everything that may be read while it is compiled decides the code, so it is part of the key.

use super::HEADERS;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The files a source may include, directly or not.
#[derive(Debug, Default)]
pub(super) struct Includes {
    /// The user's files: path and text. All files that a name could mean are here, not only the one it does mean.
    files: BTreeMap<PathBuf, String>,
    /// Included names found only in the toolkit or not at all, with what identifies them.
    names: BTreeMap<String, String>,
    /// Whether the toolkit's folders are needed.
    pub system: bool,
    /// Whether every include could be read; where not, nothing is kept.
    pub certain: bool,
    /// A file that begins with a byte-order mark. NVRTC reads files itself, and takes the mark for a mistake.
    pub marked: Option<PathBuf>,
    own: bool,
}

impl Includes {
    /// Looks at a text and all it includes, in these folders, then in those of the toolkit.
    pub fn of(text: &str, folders: &[PathBuf], system: &[PathBuf]) -> Self {
        let mut found = Self { certain: true, ..Self::default() };
        let mut texts: Vec<(String, Option<PathBuf>)> = vec![(text.to_owned(), None)];
        while let Some((text, beside)) = texts.pop() {
            for name in found.named_in(&text) {
                let mut here = false;
                for folder in beside.iter().chain(folders) {
                    let path = folder.join(&name);
                    if found.files.contains_key(&path) {
                        here = true;
                        continue;
                    }
                    let Ok(bytes) = std::fs::read(&path) else { continue };
                    if !here && bytes.starts_with(b"\xef\xbb\xbf") {
                        found.marked.get_or_insert_with(|| path.clone()); // the first is the one that is meant
                    }
                    let text = String::from_utf8_lossy(&bytes).into_owned();
                    texts.push((text.clone(), path.parent().map(Path::to_owned)));
                    found.files.insert(path, text);
                    here = true;
                }
                let own = HEADERS.iter().any(|(own, _)| *own == name);
                found.own |= own;
                if !here && !own {
                    found.outside(name, system);
                }
            }
        }
        found
    }

    /// Everything that decides the code, for a key.
    pub fn parts(&self) -> impl Iterator<Item = String> {
        let files = self.files.iter().flat_map(|(path, text)| [path.display().to_string(), text.clone()]);
        files.chain(self.names.iter().flat_map(|(name, known)| [name.clone(), known.clone()]))
    }

    /// The texts that may define types and macros of the source.
    pub fn texts(&self) -> Vec<&str> {
        let own = HEADERS.iter().map(|(_, text)| *text).filter(|_| self.own);
        own.chain(self.files.values().map(String::as_str)).collect()
    }

    /// A header of the toolkit is known by its place, size and time; one that is missing by being missing.
    fn outside(&mut self, name: String, system: &[PathBuf]) {
        let file = system.iter().map(|folder| folder.join(&name)).find(|path| path.is_file());
        let known = file.map(|path| {
            self.system = true;
            let metadata = std::fs::metadata(&path).ok();
            format!("{} {:?}", path.display(), metadata.map(|m| (m.len(), m.modified().ok())))
        });
        self.names.insert(name, known.unwrap_or_default());
    }

    /// The names in `#include "name"`, `#include <name>` and `__has_include(...)`.
    fn named_in(&mut self, text: &str) -> Vec<String> {
        let mut names = Vec::new();
        for line in text.lines() {
            if let Some((_, rest)) = line.split_once("__has_include") {
                let rest = rest.trim_start().trim_start_matches('(');
                names.extend(quoted(rest));
            }
            let Some(rest) = line.trim_start().strip_prefix('#') else { continue };
            let rest = rest.trim_start();
            if let Some(rest) = rest.strip_prefix("include") {
                match quoted(rest.strip_prefix("_next").unwrap_or(rest)) {
                    Some(name) => names.push(name),
                    None => self.certain = false,
                }
            } else if rest.starts_with("embed") {
                self.certain = false;
            }
        }
        names
    }
}

fn quoted(text: &str) -> Option<String> {
    let text = text.trim_start();
    let (close, rest) = match text.chars().next()? {
        '"' => ('"', &text[1..]),
        '<' => ('>', &text[1..]),
        _ => return None,
    };
    rest.split_once(close).map(|(name, _)| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_through_files_and_their_text_is_part_of_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("deep")).unwrap();
        std::fs::write(at("a.h"), "#include \"deep/b.h\"\n").unwrap();
        std::fs::write(at("deep/b.h"), "  #  include <c.h>\n#include \"a.h\"").unwrap();
        std::fs::write(at("deep/c.h"), "one").unwrap();
        let text = "#include \"a.h\"\n#if __has_include(\"later.h\")\n#endif\n";
        let folders = [folder.path().to_owned()];
        let parts = || Includes::of(text, &folders, &[]).parts().collect::<Vec<_>>();
        let before = parts();
        assert_eq!(Includes::of(text, &folders, &[]).files.len(), 3);
        std::fs::write(at("deep/c.h"), "two").unwrap();
        let changed = parts();
        assert_ne!(before, changed);
        std::fs::write(at("later.h"), "").unwrap();
        assert_ne!(changed, parts(), "a file that comes to be");
    }

    #[test]
    fn what_cannot_be_read_is_not_certain() {
        let certain = |text: &str| Includes::of(text, &[], &[]).certain;
        assert!(certain("#include <nowhere.h>\nint include;\n"));
        assert!(!certain("#include HEADER\n"));
        assert!(!certain("# embed \"x\"\n"));
    }

    #[test]
    fn our_headers_and_the_toolkits_are_known() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("cuda_fp16.h"), "").unwrap();
        let system = [folder.path().to_owned()];
        let own = Includes::of("#include \"ironhorse.cuh\"", &[], &system);
        assert!(!own.system && own.texts().len() == 1);
        assert!(Includes::of("#include <cuda_fp16.h>", &[], &system).system);
    }

    #[test]
    fn a_byte_order_mark_is_seen_in_the_file_that_is_meant() {
        let top = tempfile::tempdir().unwrap();
        let folders = ["a", "b"].map(|name| top.path().join(name));
        folders.iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
        std::fs::write(folders[0].join("h.cuh"), "int one;\n").unwrap();
        std::fs::write(folders[1].join("h.cuh"), "\u{feff}int two;\n").unwrap();
        let text = "#include \"h.cuh\"\n";
        assert_eq!(Includes::of(text, &folders, &[]).marked, None);
        let marked = folders[1].join("h.cuh");
        assert_eq!(Includes::of(text, &folders[1..], &[]).marked, Some(marked));
    }
}
