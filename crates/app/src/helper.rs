//! The helpers of mount(8) and umount(8): this program under the names `mount.pagemesh` and
//! `umount.fuse.pagemesh` in /sbin. So file systems can be in /etc/fstab.
//!
//! A helper ends once the mount is there, with the exit codes of mount(8). The process that
//! serves it goes on in a session of its own, and ends with the mount. Until it is ready, its
//! errors are the helper's; what it says later is in its log.

use crate::unmount::{How, unmount};
use anyhow::{Context, bail};
use rustix::mount::{MountFlags, mount_remount};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Names of this program under which it is a helper.
const MOUNT_NAMES: [&str; 2] = ["mount.pagemesh", "mount.fuse.pagemesh"];
const UMOUNT_NAMES: [&str; 2] = ["umount.pagemesh", "umount.fuse.pagemesh"];
/// Exit codes of mount(8).
const USAGE: u8 = 1;
const FAILED: u8 = 32;
/// How a source begins, as `df` shows it.
const SOURCE: &str = "pagemesh:";
/// How long a mount may take until it is ready: it reads all inodes.
const READY_MAX: Duration = Duration::from_secs(600);
/// How long a process may take to end that is not to serve.
const END_MAX: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Where processes log that have no service manager, for root.
const LOG_DIR: &str = "/var/log/pagemesh";

/// Options with a value that `pagemesh mount` knows, and its words for them.
const VALUED: [(&str, &str); 7] = [
    ("manager", "--manager"),
    ("key", "--key"),
    ("threads", "--threads"),
    ("transport", "--transport"),
    ("fuse", "--fuse"),
    ("scrub_every", "--scrub-every"),
    ("scrub_rate", "--scrub-rate"),
];
const FLAGS: [(&str, &str); 3] = [
    ("allow_other", "--allow-other"),
    ("no_keep_awake", "--no-keep-awake"),
    ("direct_io", "--direct-io"),
];
/// Options of the mount point that the kernel keeps.
const OF_MOUNT: [(&str, MountFlags); 4] = [
    ("ro", MountFlags::RDONLY),
    ("noexec", MountFlags::NOEXEC),
    ("noatime", MountFlags::NOATIME),
    ("nodiratime", MountFlags::NODIRATIME),
];
/// Options that are for others, or say how it is anyway.
const IGNORED: [&str; 23] = [
    "rw",
    "exec",
    "atime",
    "diratime",
    "relatime",
    "async",
    "nosuid",
    "nodev",
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "nofail",
    "_netdev",
    "default_permissions",
    "norelatime",
    "nostrictatime",
    "silent",
    "loud",
];
const IGNORED_VALUED: [&str; 5] = ["x-", "X-", "comment=", "user=", "helper="];

/// The request to a helper.
#[derive(Debug, Default, PartialEq)]
struct Asked {
    name: String,
    dir: PathBuf,
    /// Words for `pagemesh mount`.
    words: Vec<String>,
    flags: u32,
    log: Option<PathBuf>,
    is_verbose: bool,
    is_fake: bool,
}

/// Runs as a helper if this program was called by such a name.
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

type Done = Result<(), (u8, anyhow::Error)>;

fn texts(words: Vec<OsString>) -> anyhow::Result<Vec<String>> {
    let text = |word: OsString| word.into_string().ok().context("a word is not UTF-8");
    words.into_iter().map(text).collect()
}

fn run_umount(words: Vec<OsString>) -> Done {
    let parse = || -> anyhow::Result<(PathBuf, How)> {
        let (mut dir, mut how) = (None, How::Idle);
        let mut words = texts(words)?.into_iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "-t" => drop(words.next()),
                "-N" => bail!("-N: other namespaces are not supported; use nsenter(1)"),
                _ if word.starts_with('-') => {
                    // Others, as -n, -r and -v, mean nothing here.
                    if word.contains('l') {
                        how = How::Lazily;
                    }
                    if word.contains('f') {
                        how = How::ByForce;
                    }
                }
                _ => dir = Some(PathBuf::from(word)),
            }
        }
        Ok((dir.context("name the directory")?, how))
    };
    let (dir, how) = parse().map_err(|cause| (USAGE, cause))?;
    unmount(&dir, how).map_err(|cause| (FAILED, cause))
}

fn run_mount(words: Vec<OsString>) -> Done {
    let parsed = texts(words).and_then(parse);
    let asked = parsed.map_err(|cause| (USAGE, cause))?;
    match asked.is_fake {
        true => Ok(()),
        false => serve(&asked),
    }
}

fn parse(words: Vec<String>) -> anyhow::Result<Asked> {
    let mut asked = Asked::default();
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
                'o' => options.extend(split(&words.next().context("-o wants options")?)),
                't' => drop(words.next()),
                _ => bail!("-{letter} is not known; use: NAME DIR [-sfnv] [-o OPTION,…]"),
            }
        }
    }
    let Ok([source, dir]) = <[String; 2]>::try_from(places) else {
        bail!("name the file system and the directory: NAME DIR [-sfnv] [-o OPTION,…]");
    };
    asked.name = source.strip_prefix(SOURCE).unwrap_or(&source).to_owned();
    asked.dir = std::path::absolute(dir)?;
    for option in options {
        take(&mut asked, &option, is_sloppy)?;
    }
    Ok(asked)
}

/// Options are divided by commas that are not in double quotes.
fn split(options: &str) -> Vec<String> {
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

fn take(asked: &mut Asked, option: &str, is_sloppy: bool) -> anyhow::Result<()> {
    if let Some((_, flag)) = OF_MOUNT.iter().find(|(name, _)| *name == option) {
        asked.flags |= flag.bits();
        return Ok(());
    }
    if let Some((_, word)) = FLAGS.iter().find(|(name, _)| *name == option) {
        asked.words.push((*word).to_owned());
        return Ok(());
    }
    if let Some((name, value)) = option.split_once('=') {
        if name == "log" {
            asked.log = Some(std::path::absolute(value)?);
            return Ok(());
        }
        if let Some((_, word)) = VALUED.iter().find(|(known, _)| *known == name) {
            // The process that serves is in another directory.
            let value = match name {
                "key" => std::path::absolute(value)?.display().to_string(),
                _ => value.to_owned(),
            };
            asked.words.extend([(*word).to_owned(), value]);
            return Ok(());
        }
    }
    match option {
        "suid" | "dev" => {
            eprintln!("{option} is ignored: mounts of pagemesh are nosuid and nodev");
            Ok(())
        }
        "remount" => bail!("remount is not supported; unmount, and mount anew"),
        _ if IGNORED.contains(&option) || is_sloppy => Ok(()),
        _ if IGNORED_VALUED.iter().any(|start| option.starts_with(start)) => Ok(()),
        _ => bail!("the option {option} is not known; leave it out, or use -s to ignore such"),
    }
}

/// Starts the process that serves, and waits until it does.
fn serve(asked: &Asked) -> Done {
    let failed = |cause| (FAILED, cause);
    let mut server = Server::start(asked).map_err(failed)?;
    server.await_ready()?;
    if asked.flags != 0
        && let Err(cause) = restrict(&asked.dir, asked.flags)
    {
        server.end(&asked.dir);
        return Err(failed(cause));
    }
    if asked.is_verbose {
        let (name, dir, pid) = (&asked.name, asked.dir.display(), server.child.id());
        println!("{name} is mounted on {dir}; process {pid} serves it");
    }
    Ok(())
}

/// The mount is there already, and is `nosuid` and `nodev`, which a remount has to repeat.
fn restrict(dir: &Path, flags: u32) -> anyhow::Result<()> {
    let flags = MountFlags::from_bits_retain(flags);
    let flags = flags | MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
    let done = mount_remount(dir, flags, "");
    done.with_context(|| format!("cannot set the options of {}", dir.display()))
}

/// The process that serves a mount.
struct Server {
    child: Child,
    /// Its log, and where it began; none where a service manager gets it.
    log: Option<(File, u64)>,
}

impl Server {
    fn start(asked: &Asked) -> anyhow::Result<Server> {
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
            .args(&asked.words)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .context("cannot start the process that serves")?;
        Ok(Server { child, log })
    }

    /// Waits for its word that the mount is there.
    fn await_ready(&mut self) -> Done {
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
        match told.recv_timeout(READY_MAX) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(_) => {
                // It has not mounted anything, or does not say so.
                let _ = self.child.kill();
            }
        }
        let code = self.child.wait().ok().and_then(|status| status.code());
        let said = self.said();
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
            // Its command line is wrong, and so were the options.
            Some(2) => Err((USAGE, error)),
            _ => Err((FAILED, error)),
        }
    }

    /// Its output so far.
    fn said(&mut self) -> String {
        let mut said = String::new();
        if let Some((log, from)) = &mut self.log
            && log.seek(SeekFrom::Start(*from)).is_ok()
        {
            // An unreadable part is in the log for people.
            let _ = log.read_to_string(&mut said);
        }
        said
    }

    /// Ends a mount that is not as it should be.
    fn end(&mut self, dir: &Path) {
        if let Err(cause) = unmount(dir, How::ByForce) {
            tracing::warn!(%cause, "the mount is left");
        }
        let until = Instant::now() + END_MAX;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// The log and its end. Where there is no place for one, it is not kept.
fn open_log(asked: &Asked) -> anyhow::Result<(File, u64)> {
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

    fn parsed(line: &str) -> anyhow::Result<Asked> {
        parse(line.split(' ').map(str::to_owned).collect())
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
        assert_eq!(asked.words, words);
        let flags = MountFlags::RDONLY | MountFlags::NOEXEC;
        assert_eq!(asked.flags, flags.bits());
        assert_eq!(asked.log, Some("/l".into()));
        assert!(asked.is_verbose && !asked.is_fake);
    }

    #[test]
    fn wrong_lines_are_refused_unless_sloppy() {
        for line in [
            "home",
            "home /mnt more",
            "home /mnt -o",
            "home /mnt -x",
            "home /mnt -o unknown",
            "home /mnt -o remount,ro",
            "home /mnt -N 5",
        ] {
            assert!(parsed(line).is_err(), "{line}");
        }
        assert!(parsed("home /mnt -s -o unknown,context=x").is_ok());
    }

    #[test]
    fn quoted_commas_divide_no_options() {
        assert_eq!(split(r#"a="b,c",,d"#), ["a=b,c", "d"]);
    }
}
