//! Volumes: layouts, attach, mirrors, resynchronisation.
