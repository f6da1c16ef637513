//! Names of tests.

use crate::{check_sizes, exceptions, sources};
use syn::visit::{self, Visit};

const CHARS_MAX: usize = 60;

struct Tests<'p> {
    path: &'p str,
    names: Vec<(String, String)>,
}

impl<'a> Visit<'a> for Tests<'_> {
    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        if item.attrs.iter().any(|it| it.path().is_ident("test")) {
            self.names
                .push((self.path.to_owned(), item.sig.ident.to_string()));
        }
        visit::visit_item_fn(self, item);
    }
}

fn tests() -> Vec<(String, String)> {
    let mut names = Vec::new();
    for source in sources() {
        let mut tests = Tests {
            path: &source.path,
            names: Vec::new(),
        };
        tests.visit_file(&source.parsed());
        names.extend(tests.names);
    }
    names
}

#[test]
fn test_names_are_short() {
    let long = tests()
        .into_iter()
        .filter(|(_, name)| name.len() > CHARS_MAX);
    let long: Vec<_> = long.map(|(_, name)| (name.clone(), name.len())).collect();
    let reason = "a name of at most 60 characters says subject, condition and result";
    check_sizes("names of tests", reason, &long, exceptions::TEST_NAMES);
}

#[test]
fn test_names_start_with_their_subject() {
    let articles = [
        "a_",
        "an_",
        "the_",
        "who_",
        "what_",
        "whoever_",
        "whatever_",
    ];
    let starts = |name: &str| articles.iter().any(|it| name.starts_with(it));
    let wrong = tests().into_iter().filter(|(_, name)| starts(name));
    let wrong: Vec<_> = wrong.map(|(_, name)| (name, 1)).collect();
    let reason = "an article says nothing, and a pronoun hides the subject";
    check_sizes("names of tests", reason, &wrong, exceptions::TEST_SUBJECTS);
}
