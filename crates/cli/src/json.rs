//! JSON out, by hand: a few flat objects do not need a library.

use std::fmt::Write;

/// A string literal.
pub(crate) fn string(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if c < ' ' => {
                let _infallible = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// An object of members whose values are JSON already.
pub(crate) fn object<K: AsRef<str>, V: AsRef<str>>(
    members: impl IntoIterator<Item = (K, V)>,
) -> String {
    let members: Vec<String> = members
        .into_iter()
        .map(|(name, value)| format!("{}: {}", string(name.as_ref()), value.as_ref()))
        .collect();
    format!("{{{}}}", members.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_escaped() {
        assert_eq!(string("a\"b\\c\n\u{1}é"), "\"a\\\"b\\\\c\\n\\u0001é\"");
        assert_eq!(
            object([("a", "1"), ("b", "true")]),
            "{\"a\": 1, \"b\": true}"
        );
    }
}
