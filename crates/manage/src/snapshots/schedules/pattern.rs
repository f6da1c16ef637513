//! Patterns of names of volumes: `*` stands for any text.

/// Bytes of the longest pattern: a name of a volume has as many.
const PATTERN_BYTES_MAX: usize = 64;

/// Whether the text is a name of a volume, or a pattern of names.
#[must_use]
pub fn is_pattern(text: &str) -> bool {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || "_.-*".contains(c);
    (1..=PATTERN_BYTES_MAX).contains(&text.len()) && text.chars().all(is_of_name)
}

/// Whether the pattern is of this name.
#[must_use]
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else {
        return false;
    };
    let Some(last) = parts.next_back() else {
        return rest.is_empty();
    };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn star_stands_for_any_text() {
        for (pattern, yes, no) in [
            ("db", &["db"][..], &["db1", "xdb", ""][..]),
            ("db-*", &["db-", "db-a"], &["db", "xdb-a"]),
            ("*", &["", "a"], &[]),
            ("*-log", &["a-log", "-log"], &["a-logs"]),
            ("a*b*c", &["abc", "axbxc", "abbc"], &["acb", "ab", "abcd"]),
            ("a*a", &["aa", "aba"], &["a", "ab"]),
        ] {
            assert!(yes.iter().all(|name| matches(pattern, name)), "{pattern}");
            assert!(!no.iter().any(|name| matches(pattern, name)), "{pattern}");
        }
        for bad in ["", "a b", "a/b", "a@b", "é", &"x".repeat(65)] {
            assert!(!is_pattern(bad), "{bad}");
        }
        assert!(is_pattern("db-*"));
    }
}
