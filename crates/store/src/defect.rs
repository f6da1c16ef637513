//! The deliberate defects of the store ([`pagemesh_base::defect`]). Hooks that need more than a
//! condition lie next to the code that they break: `session/defects`, `owner/defects`.

pub(crate) use pagemesh_base::defect::{Defect, is};
