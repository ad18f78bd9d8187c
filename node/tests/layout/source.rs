//! The files of the project, and Rust text without what is not code.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The project's text files by path from the workspace root, with `/` between the parts.
pub(crate) struct Tree(BTreeMap<String, String>);

impl Tree {
    /// Reads the files that git tracks, or without git all outside of build output and dot folders.
    pub(crate) fn of_workspace() -> Self {
        let root = workspace_root();
        let paths = tracked(&root).unwrap_or_else(|| walked(&root));
        let text_of = |path: String| {
            let text = std::fs::read_to_string(root.join(&path)).ok()?;
            Some((path, text))
        };
        Self(paths.into_iter().filter_map(text_of).collect())
    }

    pub(crate) fn of_samples(samples: &[(&str, &str)]) -> Self {
        Self(samples.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect())
    }

    /// The text of a file that must be there.
    pub(crate) fn text(&self, path: &str) -> String {
        assert!(self.0.contains_key(path), "{path} is not in the tree");
        self.0[path].clone()
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    pub(crate) fn rust_files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files().filter(|(path, _)| path.ends_with(".rs"))
    }

    /// Rust files as code: comments, literals and `#[cfg(test)]` items blanked, test-only files left out.
    pub(crate) fn product_code(&self) -> Vec<(&str, String)> {
        let mut code = Vec::new();
        let mut test_modules = Vec::new();
        for (path, text) in self.rust_files().filter(|(path, _)| !path.contains("/tests/")) {
            let (product, out_of_line) = without_tests(&code_only(text));
            let folder = module_folder(path);
            test_modules.extend(out_of_line.iter().map(|name| format!("{folder}{name}")));
            code.push((path, product));
        }
        let is_test = |path: &str| {
            let of = |m: &String| path == format!("{m}.rs") || path.starts_with(&format!("{m}/"));
            test_modules.iter().any(of)
        };
        code.retain(|(path, _)| !is_test(path));
        code
    }
}

fn workspace_root() -> PathBuf {
    let mut folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    loop {
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap_or_default();
        if manifest.contains("[workspace]") {
            return folder.to_owned();
        }
        folder = folder.parent().expect("a folder above holds the workspace manifest");
    }
}

fn tracked(root: &Path) -> Option<Vec<String>> {
    let output = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output().ok()?;
    let names = String::from_utf8(output.stdout).ok()?;
    let paths: Vec<String> = names.split('\0').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    (output.status.success() && !paths.is_empty()).then_some(paths)
}

fn walked(root: &Path) -> Vec<String> {
    let mut paths = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("the tree is readable").flatten() {
            let path = entry.path();
            let name = entry.file_name();
            if path.is_file() {
                let inside = path.strip_prefix(root).expect("walked down from the root");
                paths.push(inside.to_string_lossy().replace('\\', "/"));
            } else if path.is_dir()
                && !(name == "target" || name == "data" || name.as_encoded_bytes()[0] == b'.')
            {
                folders.push(path);
            }
        }
    }
    paths
}

/// Gives the folder of a file's out-of-line modules: `a/` for `a/mod.rs`, `a/b/` for `a/b.rs`.
fn module_folder(path: &str) -> String {
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    match name {
        "mod.rs" | "lib.rs" | "main.rs" => format!("{folder}/"),
        _ => format!("{}/", path.trim_end_matches(".rs")),
    }
}

pub(crate) fn is_ident(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Gives the offsets at which `word` stands as a whole word.
pub(crate) fn words<'t>(text: &'t str, word: &'t str) -> impl Iterator<Item = usize> + 't {
    let bytes = text.as_bytes();
    text.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let before = at.checked_sub(1).is_none_or(|i| !is_ident(bytes[i]));
        before && bytes.get(at + word.len()).is_none_or(|&b| !is_ident(b))
    })
}

pub(crate) fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|&&b| b == b'\n').count() + 1
}

/// Rust text with comments, strings and characters blanked; lines and byte offsets stay.
pub(crate) fn code_only(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => find(bytes, at, b"\n"),
            b'/' if bytes[at..].starts_with(b"/*") => block_comment_end(bytes, at),
            b'"' => string_end(bytes, at),
            b'\'' => character_end(bytes, at),
            byte if is_ident(byte) => {
                let word = at + bytes[at..].iter().take_while(|&&b| is_ident(b)).count();
                let raw = matches!(&bytes[at..word], b"r" | b"br" | b"cr");
                let Some(end) = raw.then(|| raw_string_end(bytes, word)).flatten() else {
                    at = word;
                    continue;
                };
                end
            }
            _ => at,
        };
        for byte in &mut code[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end.max(at + 1);
    }
    String::from_utf8(code).expect("whole characters were blanked")
}

/// The offset of `needle` at or after `at`, or the end.
fn find(bytes: &[u8], at: usize, needle: &[u8]) -> usize {
    bytes[at..].windows(needle.len()).position(|window| window == needle).map_or(bytes.len(), |i| at + i)
}

fn block_comment_end(bytes: &[u8], start: usize) -> usize {
    let mut depth = 0;
    let mut at = start;
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if bytes[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    at
}

fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

fn raw_string_end(bytes: &[u8], hashes_at: usize) -> Option<usize> {
    let hashes = bytes[hashes_at..].iter().take_while(|&&b| b == b'#').count();
    let quote = hashes_at + hashes;
    (bytes.get(quote) == Some(&b'"')).then(|| {
        let closing = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
        (find(bytes, quote + 1, &closing) + closing.len()).min(bytes.len())
    })
}

/// The end of a character literal, or `start` for a lifetime.
fn character_end(bytes: &[u8], start: usize) -> usize {
    let Some(&first) = bytes.get(start + 1) else { return start };
    if first == b'\\' {
        return (find(bytes, start + 3, b"'") + 1).min(bytes.len());
    }
    let width = match first {
        0..=0x7f => 1,
        0x80..=0xdf => 2,
        0xe0..=0xef => 3,
        _ => 4,
    };
    let close = start + 1 + width;
    if bytes.get(close) == Some(&b'\'') { close + 1 } else { start }
}

/// The offset after the item that starts at `at`: past its `;` or its closing brace.
pub(crate) fn item_end(code: &str, at: usize) -> usize {
    let mut depth = 0usize;
    let mut braces = 0usize;
    for (i, byte) in code.bytes().enumerate().skip(at) {
        match byte {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth = depth.saturating_sub(1),
            b'{' => braces += 1,
            b'}' => {
                braces = braces.saturating_sub(1);
                if braces == 0 && depth == 0 {
                    return i + 1;
                }
            }
            b';' if depth == 0 && braces == 0 => return i + 1,
            _ => {}
        }
    }
    code.len()
}

/// Code with its `#[cfg(test)]` items blanked, and the names of the test modules that have a file of their own.
pub(crate) fn without_tests(code: &str) -> (String, Vec<String>) {
    let mut product = code.as_bytes().to_vec();
    let mut out_of_line = Vec::new();
    let attributes = ["#[cfg(test)]", "#[cfg(all(test"];
    for start in attributes.iter().flat_map(|a| code.match_indices(a).map(|(at, _)| at)) {
        let mut item = start;
        while code[item..].trim_start().starts_with("#[") {
            item += code[item..].find(']').map_or(1, |close| close + 1);
        }
        let end = item_end(code, item);
        if let Some((_, name)) = code[item..end].trim_end_matches(';').split_once("mod ")
            && !name.contains('{')
        {
            out_of_line.push(name.trim().to_owned());
        }
        product[start..end].iter_mut().filter(|b| **b != b'\n').for_each(|b| *b = b' ');
    }
    (String::from_utf8(product).expect("whole items were blanked"), out_of_line)
}

#[test]
fn literals_and_comments_are_not_code() {
    let source = "let a = \"name!() // {\"; /* { /* */ */ let c = '{'; let r = r#\"}\"}\"#; f::<'a>('\\'', b\"{\") // }";
    let code = code_only(source);
    assert_eq!(code.len(), source.len());
    assert_eq!(code.split_whitespace().collect::<String>(), "leta=;letc=;letr=;f::<'a>(,b)");
}

#[test]
fn test_items_are_not_product() {
    let code = "fn a() {}\n#[cfg(test)]\nmod contract;\n#[cfg(test)]\nmod tests { fn b() { {} } }\nfn c() {}";
    let (product, out_of_line) = without_tests(code);
    assert_eq!(product.split_whitespace().collect::<String>(), "fna(){}fnc(){}");
    assert_eq!(out_of_line, ["contract"]);
}

#[test]
fn files_of_test_modules_are_not_product() {
    let tree = Tree::of_samples(&[
        ("node/src/a/mod.rs", "#[cfg(test)]\nmod contract;\nmod b;"),
        ("node/src/a/contract.rs", "fn x() {}"),
        ("node/src/a/contract/more.rs", "fn x() {}"),
        ("node/src/a/b.rs", "#[cfg(test)]\nmod tests;"),
        ("node/src/a/b/tests.rs", "fn x() {}"),
        ("node/tests/it.rs", "fn x() {}"),
    ]);
    let product: Vec<&str> = tree.product_code().iter().map(|(path, _)| *path).collect();
    assert_eq!(product, ["node/src/a/b.rs", "node/src/a/mod.rs"]);
}
