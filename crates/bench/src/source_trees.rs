//! A program's source tree, unpacked by tar(1) and cloned by git(1), each with a sync of its file system at
//! the end.
//!
//! A tree is made once, outside of the places. In each round every place has both, in a new directory, which is removed
//! without being timed; the first place moves on by one.

use crate::error::BenchError;
use crate::mirror::MountPlace;
use crate::process::{ChildProcess, command_killed_with_thread, require_program};
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest time of one command.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(300);

/// Makes a tree of `$2` files below `$1`, and a repository and an archive of it.
const MAKE_SCRIPT: &str = "
cd \"$1\"
mkdir tree
cd tree
for number in $(seq 1 \"$2\"); do
  [ $((number % 50)) -ne 1 ] || { dir=dir-$((number / 50)); mkdir $dir; }
  head -c $((number * 7919 % 16384 + 200)) /dev/urandom | base64 >$dir/file-$number
done
git init -q
git add .
git -c user.name=bench -c user.email=bench@localhost commit -q -m tree
cd ..
tar cf tree.tar tree
";
/// The scripts end with an fsync, because syncfs(2) does not reach a file system on FUSE. Unpacks the archive `$1/tree.tar` in the directory `$2`.
const TAR_SCRIPT: &str = "cd \"$2\"; tar xf \"$1/tree.tar\"; sync . && sync -f .";
/// Clones the repository `$1/tree` in the directory `$2`.
const CLONE_SCRIPT: &str =
    "cd \"$2\"; git clone -q --no-local \"$1/tree\" clone; sync . && sync -f .";
/// The commands, by their names in the report.
const COMMANDS: [(&str, &str); 2] = [("tar x", TAR_SCRIPT), ("git clone", CLONE_SCRIPT)];

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct SourceTreeOptions {
    /// Rounds, at least [`crate::session::ROUNDS_MIN`].
    pub rounds: usize,
    /// Files of the tree, of 11 KiB on average.
    pub files: u32,
}

/// Runs the comparison; see the module. Ratios are speeds: those of the places to that of the last one.
///
/// # Errors
/// If an option is invalid, or a program is missing or fails.
pub fn run_source_trees(
    places: &[MountPlace],
    options: &SourceTreeOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    if places.len() < 2 || options.files == 0 {
        let text = "there is nothing to compare; name at least two places and one file";
        return Err(BenchError::Option(text.into()));
    }
    for (program, package) in [("git", "git"), ("tar", "tar")] {
        require_program(program, package)?;
    }
    let made = TempDir::new().map_err(BenchError::system("make a directory"))?;
    let files = options.files.to_string();
    run_script(
        "making a tree",
        MAKE_SCRIPT,
        &[&text_of(made.path()), &files],
    )?;
    let mut seconds = vec![vec![Vec::new(); COMMANDS.len()]; places.len()];
    for round in 0..options.rounds {
        for turn in 0..places.len() {
            let at = (turn + round) % places.len();
            for (samples, (name, script)) in seconds[at].iter_mut().zip(COMMANDS) {
                let taken = time_command(&places[at], name, script, made.path())?;
                eprintln!(
                    "round {} of {}: {name} on {}: {taken:.2} s",
                    round + 1,
                    options.rounds,
                    places[at].name
                );
                samples.push(taken);
            }
        }
    }
    Ok(report(places, options, &seconds))
}

fn text_of(path: &Path) -> String {
    path.display().to_string()
}

fn run_script(name: &str, script: &str, args: &[&str]) -> Result<(), BenchError> {
    let mut command = command_killed_with_thread("sh");
    command.args(["-eu", "-c", script, "sh"]).args(args);
    ChildProcess::start(name, command)?.wait_for_success(COMMAND_TIME_MAX)
}

fn time_command(
    place: &MountPlace,
    name: &str,
    script: &str,
    made: &Path,
) -> Result<f64, BenchError> {
    let dir = TempDir::new_in(&place.dir).map_err(BenchError::system(format!(
        "make a directory on {}",
        place.name
    )))?;
    let start = Instant::now();
    let args = [text_of(made), text_of(dir.path())];
    run_script(
        &format!("{name} on {}", place.name),
        script,
        &[&args[0], &args[1]],
    )?;
    Ok(start.elapsed().as_secs_f64())
}

fn report(places: &[MountPlace], options: &SourceTreeOptions, seconds: &[Vec<Vec<f64>>]) -> Report {
    let title = "a source tree of small files, with a sync at the end";
    let last = places.len() - 1;
    let to_last = format!("speed to {}", places[last].name);
    let columns = [
        ("place", ""),
        ("command", ""),
        ("time", "s"),
        (to_last.as_str(), "×"),
    ];
    let mut report = Report::new("source-trees", title, &places[0].class, &columns);
    for (place, of_place) in places.iter().zip(seconds) {
        for (command, (name, _)) in COMMANDS.iter().enumerate() {
            report.add_row(vec![
                ReportCell::from(place.name.as_str()),
                (*name).into(),
                median(&of_place[command]).into(),
                median_ratio(&seconds[last][command], &of_place[command]).into(),
            ]);
        }
    }
    report.add_note(format!(
        "medians of {} alternating rounds, {} files; ratios are medians of the rounds' own",
        options.rounds, options.files
    ));
    report.raw = json!({
        "places": places.iter().map(|place| &place.name).collect::<Vec<_>>(),
        "seconds_by_place_command_round": seconds,
    });
    report
}
