//! The manual page and the shell completions, from the definition of the command line.

use crate::commands::Cli;
use crate::output;
use clap::CommandFactory;

/// Prints the completions of a shell.
pub fn print_completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut command = Cli::command();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "pagemesh", &mut script);
    output::print_text(&String::from_utf8_lossy(&script))
}

/// Prints the manual page of the command, followed by the pages of its subcommands.
pub fn print_man() -> anyhow::Result<()> {
    let mut pages = Vec::new();
    print_page(Cli::command(), &mut pages)?;
    output::print_text(&String::from_utf8_lossy(&pages))
}

fn print_page(command: clap::Command, out: &mut impl std::io::Write) -> anyhow::Result<()> {
    clap_mangen::Man::new(command.clone()).render(out)?;
    for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        let name = format!("{}-{}", command.get_name(), subcommand.get_name());
        print_page(subcommand.clone().name(name), out)?;
    }
    Ok(())
}
