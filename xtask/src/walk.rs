pub(crate) fn print() -> anyhow::Result<()> {
    Ok(())
}
