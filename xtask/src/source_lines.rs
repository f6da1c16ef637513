//! Functions found in Rust files line by line, for tools that need names and no syntax tree.

/// The name of the function with its signature on this line.
pub(crate) fn function_name(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("fn ")?;
    let is_word = |word: &str| {
        word.chars()
            .all(|c| c.is_ascii_alphanumeric() || "()_".contains(c))
    };
    (before.split_whitespace().all(is_word)).then(|| leading_identifier(after))
}

pub(crate) fn leading_identifier(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}
