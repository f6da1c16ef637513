//! Structures in pages of the space: directories and the maps of files.

pub(crate) mod directory;
pub(crate) mod page_map;
