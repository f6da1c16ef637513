//! Functions and variables of loaded libraries, by name.

use super::elf::{self, LoadedObject, SymbolName};

/// A function of the libraries that this one was linked with.
pub fn find_in_needed(own: LoadedObject, name: SymbolName, version: Option<u32>) -> Option<usize> {
    let mut found = own.needed().map(|it| it.function(name, version));
    found.find_map(|it| it)
}

/// The C library's own function, whichever functions the program and other libraries define.
pub fn c_library_function(name: SymbolName) -> Option<usize> {
    find_in_needed(elf::own_object()?, name, None)
}

/// The C library's own variable.
pub fn c_library_variable(name: SymbolName) -> Option<usize> {
    let mut found = elf::own_object()?.needed().map(|it| it.data(name));
    found.find_map(|it| it)
}

/// The next function of this name behind this library, in the order in which names are looked up.
pub fn next_definition(name: SymbolName) -> Option<usize> {
    let own = elf::own_object()?;
    let mut later = elf::loaded_objects().skip_while(|it| !it.is(own)).skip(1);
    later.find_map(|it| it.function(name, None))
}
