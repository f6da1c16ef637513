//! Sizes of files and functions.

use crate::{check_sizes, exceptions, sources};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 60;

#[derive(Default)]
struct Functions {
    modules: Vec<String>,
    sizes: Vec<(String, usize)>,
}

impl Functions {
    fn add(&mut self, name: &syn::Ident, block: &syn::Block) {
        let (start, end) = (block.span().start().line, block.span().end().line);
        let path = [self.modules.join("::"), name.to_string()].join("::");
        self.sizes.push((path, end - start + 1));
    }
}

impl<'a> Visit<'a> for Functions {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        let is_test = |it: &syn::Attribute| {
            it.path().is_ident("cfg")
                && it
                    .meta
                    .require_list()
                    .is_ok_and(|it| it.tokens.to_string() == "test")
        };
        if !item.attrs.iter().any(is_test) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        let name = match &*item.self_ty {
            syn::Type::Path(it) => it.path.segments.last().map(|it| it.ident.to_string()),
            _ => None,
        };
        self.modules.extend(name.clone());
        visit::visit_item_impl(self, item);
        if name.is_some() {
            self.modules.pop();
        }
    }

    fn visit_item_fn(&mut self, item: &'a syn::ItemFn) {
        self.add(&item.sig.ident, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        self.add(&item.sig.ident, &item.block);
        visit::visit_impl_item_fn(self, item);
    }
}

#[test]
fn product_files_are_short() {
    let long = sources().into_iter().filter(|it| it.is_product());
    let long = long.map(|it| (it.path.clone(), it.text.lines().count()));
    let long: Vec<_> = long.filter(|(_, lines)| *lines > FILE_LINES_MAX).collect();
    let reason = "a file of at most 600 lines has one subject that a reader can hold";
    check_sizes("lines of files", reason, &long, exceptions::FILES);
}

#[test]
fn product_functions_are_short() {
    let mut long = Vec::new();
    for source in sources().iter().filter(|it| it.is_product()) {
        let mut functions = Functions {
            modules: vec![source.path.clone()],
            ..Functions::default()
        };
        functions.visit_file(&source.parsed());
        long.extend(
            functions
                .sizes
                .into_iter()
                .filter(|(_, lines)| *lines > FUNCTION_LINES_MAX),
        );
    }
    let reason = "a function of at most 60 lines fits on a screen";
    check_sizes("lines of functions", reason, &long, exceptions::FUNCTIONS);
}

#[test]
fn overviews_are_short() {
    for (path, bytes_max) in [("README.md", 8 << 10), ("ARCHITECTURE.md", 12 << 10)] {
        let len = std::fs::read(crate::root().join(path)).unwrap().len();
        assert!(
            len <= bytes_max,
            "{path} has {len} bytes of {bytes_max}: a newcomer reads all of it; move a part into the book"
        );
    }
}
