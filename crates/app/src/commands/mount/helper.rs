//! The helpers of mount(8) and umount(8): this program under the names `mount.pagemesh` and
//! `umount.fuse.pagemesh` in /sbin. They allow pagemesh file systems in /etc/fstab.
//!
//! A helper exits once the file system is mounted, with the exit codes of mount(8). The mount
//! process continues in its own session, and exits with the mount. The helper reports errors of the
//! mount process until it is ready; later errors are in its log.

use crate::commands::mount::mount_table::{find_mount_at, resolve_parent};
use crate::commands::mount::options;
use crate::commands::umount::{UnmountMode, unmount};
use anyhow::{Context, bail};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Names under which this program is a helper.
const MOUNT_NAMES: [&str; 2] = ["mount.pagemesh", "mount.fuse.pagemesh"];
const UMOUNT_NAMES: [&str; 2] = ["umount.pagemesh", "umount.fuse.pagemesh"];
/// Exit codes of mount(8).
const EXIT_USAGE: u8 = 1;
const EXIT_MOUNT_FAILED: u8 = 32;
/// The start of a mount source, as `df` shows it.
const SOURCE: &str = "pagemesh:";
/// Limit of the start of a mount, which reads all inodes.
const READY_TIMEOUT: Duration = Duration::from_secs(600);
/// Log directory of root's mounts outside of a service manager.
const LOG_DIR: &str = "/var/log/pagemesh";

/// Mount options with a value, and the matching flags of `pagemesh mount`.
const VALUE_OPTIONS: [(&str, &str); 9] = [
    ("commit", "--commit-interval"),
    ("manager", "--manager"),
    ("key", "--key"),
    ("threads", "--threads"),
    ("transport", "--transport"),
    ("fuse", "--fuse"),
    ("scrub_every", "--scrub-every"),
    ("scrub_rate", "--scrub-rate"),
    ("metrics", "--metrics"),
];
const FLAG_OPTIONS: [(&str, &str); 6] = [
    ("force", "--force"),
    ("allow_other", "--allow-other"),
    ("no_keep_awake", "--no-keep-awake"),
    ("direct_io", "--direct-io"),
    ("show_snapshots", "--show-snapshots"),
    ("metrics_allow_remote", "--metrics-allow-remote"),
];
/// The start of options that the kernel shows and the mount process has set.
const KERNEL_PREFIXES: [&str; 5] = [
    "user_id=",
    "group_id=",
    "rootmode=",
    "max_read=",
    "blksize=",
];

/// The request to a helper.
#[derive(Debug, Default, PartialEq)]
struct HelperRequest {
    name: String,
    dir: PathBuf,
    /// Arguments of `pagemesh mount`.
    mount_args: Vec<String>,
    /// Options of `pagemesh mount -o`.
    options: Vec<String>,
    is_remount: bool,
    log: Option<PathBuf>,
    is_verbose: bool,
    is_fake: bool,
}

/// Runs as a helper if this program has a helper's name.
pub fn run_if_named() -> Option<ExitCode> {
    let mut words = std::env::args_os();
    let program = PathBuf::from(words.next()?);
    let name = program.file_name()?.to_str()?;
    let is_mount = MOUNT_NAMES.contains(&name);
    if !is_mount && !UMOUNT_NAMES.contains(&name) {
        return None;
    }
    crate::start_log();
    let done = match is_mount {
        true => run_mount(words.collect()),
        false => run_umount(words.collect()),
    };
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, error)) => {
            eprintln!("{name}: {error:#}");
            ExitCode::from(code)
        }
    })
}

type HelperResult = Result<(), (u8, anyhow::Error)>;

fn to_utf8(words: Vec<OsString>) -> anyhow::Result<Vec<String>> {
    let text = |word: OsString| word.into_string().ok().context("a word is not UTF-8");
    words.into_iter().map(text).collect()
}

fn run_umount(words: Vec<OsString>) -> HelperResult {
    let parse = || -> anyhow::Result<(PathBuf, UnmountMode)> {
        let (mut dir, mut how) = (None, UnmountMode::IfUnused);
        let mut words = to_utf8(words)?.into_iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "-t" => drop(words.next()),
                "-N" => bail!("-N: other namespaces are not supported; use nsenter(1)"),
                _ if word.starts_with('-') => {
                    // Other options, such as -n, -r and -v, have no effect here.
                    if word.contains('l') {
                        how = UnmountMode::Lazy;
                    }
                    if word.contains('f') {
                        how = UnmountMode::Forced;
                    }
                }
                _ => dir = Some(PathBuf::from(word)),
            }
        }
        Ok((dir.context("name the directory")?, how))
    };
    let (dir, how) = parse().map_err(|cause| (EXIT_USAGE, cause))?;
    unmount(&dir, how).map_err(|cause| (EXIT_MOUNT_FAILED, cause))
}

fn run_mount(words: Vec<OsString>) -> HelperResult {
    let parsed = to_utf8(words).and_then(parse_mount_line);
    let asked = parsed.map_err(|cause| (EXIT_USAGE, cause))?;
    match (asked.is_fake, asked.is_remount) {
        (true, _) => Ok(()),
        (false, true) => remount(&asked).map_err(|cause| (EXIT_MOUNT_FAILED, cause)),
        (false, false) => start_mount(&asked),
    }
}

fn parse_mount_line(words: Vec<String>) -> anyhow::Result<HelperRequest> {
    let mut asked = HelperRequest::default();
    let (mut places, mut options, mut is_sloppy) = (Vec::new(), Vec::new(), false);
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let Some(letters) = word.strip_prefix('-').filter(|it| !it.is_empty()) else {
            places.push(word);
            continue;
        };
        for letter in letters.chars() {
            match letter {
                's' => is_sloppy = true,
                'f' => asked.is_fake = true,
                'v' => asked.is_verbose = true,
                'n' | 'w' => {}
                'r' => options.push("ro".to_owned()),
                'o' => options.extend(split_options(&words.next().context("-o wants options")?)),
                't' => drop(words.next()),
                _ => bail!("-{letter} is not known; use: NAME DIR [-sfnv] [-o OPTION,…]"),
            }
        }
    }
    let Ok([source, dir]) = <[String; 2]>::try_from(places) else {
        bail!("name the file system and the directory: NAME DIR [-sfnv] [-o OPTION,…]");
    };
    if source.starts_with('/') {
        bail!(
            "{source} is no file system. mount(8) takes a name for a path if a directory has it, as /home for \
             home in /etc/fstab; write the source as {SOURCE}NAME"
        );
    }
    asked.name = source.strip_prefix(SOURCE).unwrap_or(&source).to_owned();
    asked.dir = std::path::absolute(dir)?;
    for option in options {
        apply_option(&mut asked, &option, is_sloppy)?;
    }
    Ok(asked)
}

/// Splits options at commas outside of double quotes.
fn split_options(options: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    let mut is_quoted = false;
    for c in options.chars() {
        match (c, found.last_mut()) {
            ('"', _) => is_quoted = !is_quoted,
            (',', _) if !is_quoted => found.push(String::new()),
            (c, Some(last)) => last.push(c),
            (_, None) => {}
        }
    }
    found.retain(|option| !option.is_empty());
    found
}

fn apply_option(asked: &mut HelperRequest, option: &str, is_sloppy: bool) -> anyhow::Result<()> {
    if let Some((_, word)) = FLAG_OPTIONS.iter().find(|(name, _)| *name == option) {
        asked.mount_args.push((*word).to_owned());
        return Ok(());
    }
    if let Some((name, value)) = option.split_once('=') {
        if name == "log" {
            asked.log = Some(std::path::absolute(value)?);
            return Ok(());
        }
        if let Some((_, word)) = VALUE_OPTIONS.iter().find(|(known, _)| *known == name) {
            // The mount process runs in another directory.
            let value = match name {
                "key" => std::path::absolute(value)?.display().to_string(),
                _ => value.to_owned(),
            };
            asked.mount_args.extend([(*word).to_owned(), value]);
            return Ok(());
        }
        if KERNEL_PREFIXES
            .iter()
            .any(|start| option.starts_with(start))
        {
            return Ok(());
        }
    }
    match (option, options::parse_option(option)) {
        ("remount", _) => asked.is_remount = true,
        (_, Ok(_)) => asked.options.push(option.to_owned()),
        (_, Err(_)) if is_sloppy => {}
        (_, Err(cause)) => bail!(
            "{cause}, {}; leave it out, or use -s to ignore such",
            helper_options()
        ),
    }
    Ok(())
}

/// The options of the helper alone, for people.
fn helper_options() -> String {
    let flags = FLAG_OPTIONS.map(|(name, _)| name.to_owned());
    let values = VALUE_OPTIONS.map(|(name, _)| format!("{name}=…"));
    let all: Vec<String> = flags.into_iter().chain(values).collect();
    format!("log=…, {}", all.join(", "))
}

/// Starts the mount process, and waits until it serves.
fn start_mount(asked: &HelperRequest) -> HelperResult {
    let mut server = MountServer::start(asked).map_err(|cause| (EXIT_MOUNT_FAILED, cause))?;
    server.await_ready()?;
    if asked.is_verbose {
        let (name, dir, pid) = (&asked.name, asked.dir.display(), server.child.id());
        println!("{name} is mounted on {dir}; process {pid} serves it");
    }
    Ok(())
}

/// Changes the options of an existing mount. Those of the mount process stay as they are.
fn remount(asked: &HelperRequest) -> anyhow::Result<()> {
    let shown = asked.dir.display();
    let Some(entry) = find_mount_at(&resolve_parent(&asked.dir)?)? else {
        bail!("no file system of pagemesh is mounted on {shown}");
    };
    let parsed = asked
        .options
        .iter()
        .map(|option| options::parse_option(option));
    let changes: Result<Vec<_>, _> = parsed.collect();
    let changes = changes.map_err(anyhow::Error::msg)?;
    let old = options::flags_of(&entry);
    let new = options::apply(old, &changes);
    if (old.is_sync, old.is_dirsync) != (new.is_sync, new.is_dirsync) {
        bail!("a remount cannot change sync and dirsync; unmount {shown}, and mount it again");
    }
    let done = pagemesh_fuse::remount_dir(&entry.dir, new);
    done.map_err(|cause| {
        let way_out = match cause.kind() {
            io::ErrorKind::PermissionDenied => "; only root can",
            io::ErrorKind::ResourceBusy => "; for ro end programs that write files there",
            _ => "",
        };
        anyhow::Error::new(cause).context(format!("cannot change the options of {shown}{way_out}"))
    })
}

/// A mount process.
struct MountServer {
    child: Child,
    /// The log and its length at the start; `None` if a service manager receives the log.
    log: Option<(File, u64)>,
}

impl MountServer {
    fn start(asked: &HelperRequest) -> anyhow::Result<MountServer> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let log = match std::env::var_os("JOURNAL_STREAM") {
            // systemd.exec(5): standard error is the journal.
            Some(_) if asked.log.is_none() => None,
            _ => Some(open_log(asked)?),
        };
        let stderr = match &log {
            None => Stdio::inherit(),
            Some((log, _)) => log.try_clone()?.into(),
        };
        let child = Command::new(program)
            .arg0("pagemesh")
            .args(["mount", &asked.name])
            .arg(&asked.dir)
            .arg("--detach")
            .args(&asked.mount_args)
            .args(asked.options.iter().flat_map(|option| ["-o", option]))
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .context("cannot start the process that serves")?;
        Ok(MountServer { child, log })
    }

    /// Waits for the message that the mount is ready.
    fn await_ready(&mut self) -> HelperResult {
        let stdout = self.child.stdout.take();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let lines = stdout.into_iter().flat_map(|it| BufReader::new(it).lines());
            let is_ready = lines
                .map_while(Result::ok)
                .any(|it| it.starts_with("ready "));
            // The helper may have given up.
            let _ = tell.send(is_ready);
        });
        match told.recv_timeout(READY_TIMEOUT) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(_) => {
                // The process has not mounted, or does not report it.
                let _ = self.child.kill();
            }
        }
        let code = self.child.wait().ok().and_then(|status| status.code());
        let said = self.output();
        let said = said.trim().trim_start_matches("error: ");
        let error = anyhow::anyhow!(
            "{}",
            if said.is_empty() {
                "it did not start"
            } else {
                said
            }
        );
        match code {
            // The command line of the process was invalid, and so were the mount options.
            Some(2) => Err((EXIT_USAGE, error)),
            _ => Err((EXIT_MOUNT_FAILED, error)),
        }
    }

    /// The output of the process so far.
    fn output(&mut self) -> String {
        let mut said = String::new();
        if let Some((log, from)) = &mut self.log
            && log.seek(SeekFrom::Start(*from)).is_ok()
        {
            // An unreadable part stays in the log for people.
            let _ = log.read_to_string(&mut said);
        }
        said
    }
}

/// Opens the log, and returns its length. Without a place for a log, output is discarded.
fn open_log(asked: &HelperRequest) -> anyhow::Result<(File, u64)> {
    let open = |path: &Path| {
        let mut options = File::options();
        options.create(true).append(true).read(true).open(path)
    };
    let log = match &asked.log {
        Some(path) => open(path).with_context(|| format!("cannot log to {}", path.display()))?,
        None => {
            let path = Path::new(LOG_DIR).join(format!("mount-{}.log", asked.name));
            let made = std::fs::create_dir_all(LOG_DIR).and_then(|()| open(&path));
            made.or_else(|_| tempfile::tempfile())?
        }
    };
    let end = log.metadata()?.len();
    Ok((log, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> anyhow::Result<HelperRequest> {
        parse_mount_line(line.split(' ').map(str::to_owned).collect())
    }

    #[test]
    fn line_of_mount_is_understood() {
        let asked = parsed(
            "pagemesh:home /mnt/home -sv -n -o rw,noauto,_netdev,x-systemd.automount,nofail \
             -o manager=http://10.0.0.1:7070,key=/etc/k,allow_other,ro,noexec,log=/l",
        )
        .expect("a line of mount");
        assert_eq!(asked.name, "home");
        assert_eq!(asked.dir, Path::new("/mnt/home"));
        let words = [
            "--manager",
            "http://10.0.0.1:7070",
            "--key",
            "/etc/k",
            "--allow-other",
        ];
        assert_eq!(asked.mount_args, words);
        assert!(asked.options.ends_with(&["ro".into(), "noexec".into()]));
        assert_eq!(asked.log, Some("/l".into()));
        assert!(asked.is_verbose && !asked.is_fake);
    }

    #[test]
    fn metrics_and_timeout_of_systemd_are_understood() {
        let line =
            "home /mnt -o metrics=10.0.0.1:9100,metrics_allow_remote,x-systemd.mount-timeout=10min";
        let asked = parsed(line).expect("a line of fstab");
        let words = ["--metrics", "10.0.0.1:9100", "--metrics-allow-remote"];
        assert_eq!(asked.mount_args, words);
    }

    #[test]
    fn commit_option_sets_the_commit_interval() {
        #[derive(clap::Parser)]
        struct CommandLine {
            #[command(flatten)]
            mount: crate::commands::mount::MountArgs,
        }
        let asked = parsed("home /mnt -o noatime,commit=5").expect("a line of fstab");
        assert_eq!(asked.mount_args, ["--commit-interval", "5"]);
        let words = ["mount", "home", "/mnt"].map(str::to_owned);
        let words = words.into_iter().chain(asked.mount_args);
        let line = <CommandLine as clap::Parser>::try_parse_from(words).expect("arguments");
        assert_eq!(line.mount.commit_interval, Some(5));
    }

    #[test]
    fn wrong_lines_are_refused_unless_sloppy() {
        for line in [
            "home",
            "home /mnt more",
            "/home /mnt/home",
            "home /mnt -o",
            "home /mnt -x",
            "home /mnt -o unknown",
            "home /mnt -o strictatime",
            "home /mnt -o remount,strictatime",
            "home /mnt -N 5",
        ] {
            assert!(parsed(line).is_err(), "{line}");
        }
        assert!(parsed("home /mnt -s -o unknown,context=x").is_ok());
    }

    #[test]
    fn remount_takes_the_options_that_the_kernel_shows() {
        let line = "pagemesh:home /mnt -o rw,relatime,user_id=0,group_id=0,default_permissions,allow_other,remount,ro";
        let asked = parsed(line).expect("options of a mount");
        assert!(asked.is_remount && asked.options.ends_with(&["ro".into()]));
    }

    #[test]
    fn quoted_commas_divide_no_options() {
        assert_eq!(split_options(r#"a="b,c",,d"#), ["a=b,c", "d"]);
    }
}
