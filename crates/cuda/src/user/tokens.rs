//! CUDA source as words, strings and single characters, with macros without arguments replaced.

use std::collections::HashMap;

#[derive(Clone, Debug)]
pub(super) struct Token {
    pub text: String,
    /// The line in the source, from 1.
    pub line: u32,
}

/// Macros or aliases by name.
pub(super) type Names = HashMap<String, Vec<Token>>;

/// How deep macros and aliases may go through each other.
pub(super) const DEPTH: usize = 16;

/// Words, strings and single characters. Directives are taken out; `#define NAME value` goes into `macros`.
pub(super) fn tokens(text: &str, macros: &mut Names) -> Vec<Token> {
    let text = text.replace("\\\r\n", " \u{1}").replace("\\\n", " \u{1}"); // \u{1}: a line that goes on, counted
    let letters: Vec<char> = text.chars().collect();
    let mut out: Vec<Token> = Vec::new();
    let (mut i, mut line, mut fresh) = (0, 1, true); // fresh: nothing but space since the line began
    while let Some(&letter) = letters.get(i) {
        let rest = |from: usize| letters.get(from).copied().unwrap_or('\n');
        let mut push = |text: String| out.push(Token { text, line });
        if letter == '\n' || letter == '\u{1}' {
            line += 1;
            fresh |= letter == '\n';
            i += 1;
        } else if letter.is_whitespace() {
            i += 1;
        } else if letter == '/' && rest(i + 1) == '/' {
            i += letters[i..].iter().take_while(|&&c| c != '\n').count();
        } else if letter == '/' && rest(i + 1) == '*' {
            i += 2;
            while i < letters.len() && !(letters[i] == '*' && rest(i + 1) == '/') {
                line += u32::from(matches!(letters[i], '\n' | '\u{1}'));
                i += 1;
            }
            i += 2;
        } else if letter == '#' && fresh {
            let directive: String = letters[i..].iter().take_while(|&&c| c != '\n').collect();
            i += directive.chars().count();
            line += directive.matches('\u{1}').count() as u32;
            define(&directive.replace('\u{1}', " "), macros);
        } else if letter == 'R' && rest(i + 1) == '"' {
            let end: String = letters[i + 2..].iter().take_while(|&&c| c != '(').collect();
            let end: Vec<char> = format!("){end}\"").chars().collect();
            let inside = letters[i..].windows(end.len()).position(|window| window == end);
            let next = inside.map_or(letters.len(), |at| i + at + end.len());
            push("\"\"".into());
            line += letters[i..next].iter().filter(|&&c| c == '\n').count() as u32;
            (i, fresh) = (next, false);
        } else if letter == '"' || letter == '\'' {
            let start = i;
            i += 1;
            while i < letters.len() && letters[i] != letter && letters[i] != '\n' {
                i += 1 + usize::from(letters[i] == '\\');
            }
            i = (i + 1).min(letters.len());
            push(letters[start..i].iter().collect());
            fresh = false;
        } else if letter.is_alphanumeric() || letter == '_' {
            let word: String =
                letters[i..].iter().take_while(|c| c.is_alphanumeric() || **c == '_').collect();
            i += word.chars().count();
            push(word);
            fresh = false;
        } else {
            push(letter.into());
            (i, fresh) = (i + 1, false);
        }
    }
    out
}

/// Keeps a macro without arguments.
fn define(directive: &str, macros: &mut Names) {
    let words = directive.trim_start_matches('#').trim_start();
    let Some(rest) = words.strip_prefix("define").filter(|rest| rest.starts_with([' ', '\t'])) else {
        return;
    };
    let rest = rest.trim_start();
    let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
    let (name, value) = rest.split_at(end);
    if !name.is_empty() && !value.starts_with('(') {
        macros.insert(name.to_owned(), tokens(value, &mut Names::new()));
    }
}

/// The tokens with macros replaced.
pub(super) fn expand(tokens: &[Token], macros: &Names) -> Vec<Token> {
    fn add(token: &Token, macros: &Names, line: u32, within: &mut Vec<String>, out: &mut Vec<Token>) {
        match macros.get(&token.text) {
            Some(value) if within.len() < DEPTH && !within.contains(&token.text) => {
                within.push(token.text.clone());
                value.iter().for_each(|token| add(token, macros, line, within, out));
                within.pop();
            }
            _ => out.push(Token { text: token.text.clone(), line }),
        }
    }
    let mut out = Vec::with_capacity(tokens.len());
    tokens.iter().for_each(|token| add(token, macros, token.line, &mut Vec::new(), &mut out));
    out
}

pub(super) fn is_word(token: &Token) -> bool {
    token.text.starts_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// The text of tokens, with spaces between words only.
pub(super) fn join(tokens: &[Token]) -> String {
    let mut out = String::new();
    for token in tokens {
        if is_word(token) && out.ends_with(|c: char| c.is_alphanumeric() || c == '_') {
            out.push(' ');
        }
        out.push_str(&token.text);
    }
    out
}
