//! `pagemesh bench`.
use crate::args::Bench;
pub fn run(_c: &Bench) -> anyhow::Result<()> {
    anyhow::bail!("soon")
}
