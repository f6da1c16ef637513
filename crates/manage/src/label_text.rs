//! The text of labels: keys with values of people's choice.

use std::collections::BTreeMap;

/// Bytes of the longest key, and of the longest value.
const LABEL_PART_BYTES_MAX: usize = 32;

/// The labels of a volume, by key.
pub type VolumeLabels = BTreeMap<String, String>;

/// The key and the value of `KEY=VALUE`; none if the text is no label.
#[must_use]
pub fn parse_label(text: &str) -> Option<(&str, &str)> {
    let (key, value) = text.split_once('=')?;
    (is_label_part(key) && is_label_part(value)).then_some((key, value))
}

/// Whether the text is a key or a value.
pub(crate) fn is_label_part(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    (1..=LABEL_PART_BYTES_MAX).contains(&text.len()) && text.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_is_a_key_and_a_value() {
        assert_eq!(parse_label("env=prod"), Some(("env", "prod")));
        assert_eq!(parse_label("a.b-c_d=1"), Some(("a.b-c_d", "1")));
        for bad in [
            "",
            "env",
            "=prod",
            "env=",
            "env=a=b",
            "e v=x",
            "env=a*",
            &format!("a={}", "x".repeat(33)),
        ] {
            assert_eq!(parse_label(bad), None, "{bad}");
        }
    }
}
