//! Access control lists of a mount, set and read by the programs of Debian's package `acl`, and enforced by the kernel. The tests
//! need root.

use crate::memory;
use crate::skip;
use crate::support_mount;
use memory::MemorySpace;
use pagemesh_fuse::Transport;
use rustix::io::Errno;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use support_mount::{TestMount, new_memory_fs};

/// A user and group without a name.
const USER: u32 = 4321;
const OTHER_USER: u32 = 4322;

/// A mount with programs for lists.
struct AclMount(TestMount);

impl AclMount {
    /// None, with a message, if the test cannot run here.
    fn new(memory: &MemorySpace, transport: Transport) -> Option<AclMount> {
        if !rustix::process::geteuid().is_root() || !has_programs() {
            skip::skip("needs root, setfacl, getfacl and setpriv");
            return None;
        }
        TestMount::new(memory, transport).map(AclMount)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    /// The list of a file as getfacl prints it, with ids, entries apart by spaces.
    #[track_caller]
    fn acl(&self, name: &str) -> String {
        let out = run(Command::new("getfacl").args(["-cnpE"]).arg(self.path(name)));
        assert!(out.status.success(), "{out:?}");
        let text = String::from_utf8(out.stdout).unwrap();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[track_caller]
    fn set_acl(&self, args: &[&str], name: &str) {
        let out = run(Command::new("setfacl").args(args).arg(self.path(name)));
        assert!(out.status.success(), "{out:?}");
    }

    fn mode(&self, name: &str) -> u32 {
        self.path(name).metadata().unwrap().mode() & 0o7777
    }

    #[track_caller]
    fn chmod(&self, name: &str, mode: u32) {
        std::fs::set_permissions(self.path(name), PermissionsExt::from_mode(mode)).unwrap();
    }

    /// Whether a user may run this shell command in the mount.
    fn may(&self, user: u32, command: &str) -> bool {
        let out = run(Command::new("setpriv")
            .args([format!("--reuid={user}"), format!("--regid={user}")])
            .args(["--clear-groups", "sh", "-c", command])
            .current_dir(self.0.dir.path()));
        out.status.success()
    }
}

fn run(command: &mut Command) -> Output {
    command.env("LC_ALL", "C").output().unwrap()
}

fn has_programs() -> bool {
    let all = ["setfacl", "getfacl", "setpriv"].iter();
    all.into_iter().all(|program| {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).any(|dir| dir.join(program).exists())
    })
}

fn write(path: &Path) {
    std::fs::write(path, b"text").unwrap();
}

fn lists_outlive_the_mount_and_follow_chmod(transport: Transport) {
    let memory = new_memory_fs();
    let Some(mount) = AclMount::new(&memory, transport) else {
        return;
    };
    write(&mount.path("file"));
    mount.chmod("file", 0o640);
    assert_eq!(mount.acl("file"), "user::rw- group::r-- other::---");
    mount.set_acl(&["-m", "u:4321:rw,g:4400:x"], "file");
    let list = "user::rw- user:4321:rw- group::r-- group:4400:--x";
    assert_eq!(mount.acl("file"), format!("{list} mask::rwx other::---"));
    assert_eq!(mount.mode("file"), 0o670);
    mount.chmod("file", 0o4644);
    assert_eq!(mount.acl("file"), format!("{list} mask::r-- other::r--"));
    drop(mount);

    let mount = AclMount::new(&memory, transport).unwrap();
    assert_eq!(mount.acl("file"), format!("{list} mask::r-- other::r--"));
    assert_eq!(mount.mode("file"), 0o4644);
    mount.set_acl(&["-b"], "file");
    assert_eq!(mount.acl("file"), "user::rw- group::r-- other::r--");
    let mut names = [0; 64];
    assert_eq!(
        rustix::fs::listxattr(mount.path("file"), &mut names[..]),
        Ok(0)
    );
    let value = [2u8, 0, 0, 0, 1, 0, 9, 0, 0, 0, 0, 0];
    let set = rustix::fs::setxattr(
        mount.path("file"),
        "system.posix_acl_access",
        &value,
        rustix::fs::XattrFlags::empty(),
    );
    assert_eq!(set, Err(Errno::INVAL));
}

fn new_files_get_default_list_or_umask(transport: Transport) {
    let Some(mount) = AclMount::new(&new_memory_fs(), transport) else {
        return;
    };
    for directory in ["plain", "listed"] {
        std::fs::create_dir(mount.path(directory)).unwrap();
        mount.chmod(directory, 0o777);
    }
    let default = "-m";
    mount.set_acl(
        &["-d", default, "u::rwx,g::r-x,o::r-x,u:4321:rwx"],
        "listed",
    );
    let make = "umask 027; touch F/f; mkdir F/d; mkfifo F/p; ln -s f F/l; mkdir -m 711 F/e";
    for directory in ["plain", "listed"] {
        assert!(mount.may(OTHER_USER, &make.replace('F', directory)));
    }
    let modes = |directory: &str| {
        ["f", "d", "p", "e"].map(|name| mount.mode(&format!("{directory}/{name}")))
    };
    assert_eq!(modes("plain"), [0o640, 0o750, 0o640, 0o711]);
    assert_eq!(modes("listed"), [0o664, 0o775, 0o664, 0o711]);
    assert_eq!(mount.acl("plain/f"), "user::rw- group::r-- other::---");
    let list = "user::rw- user:4321:rwx group::r-x mask::rw- other::r--";
    assert_eq!(mount.acl("listed/f"), list);
    assert_eq!(mount.acl("listed/p"), list);
    let list = "user::rwx user:4321:rwx group::r-x mask::rwx other::r-x";
    let default = "default:user::rwx default:user:4321:rwx default:group::r-x \
        default:mask::rwx default:other::r-x";
    assert_eq!(mount.acl("listed/d"), format!("{list} {default}"));
    mount.set_acl(&["-k"], "listed/d");
    assert_eq!(mount.acl("listed/d"), list);
    mount.set_acl(&["-k"], "plain/d");
}

fn kernel_grants_rights_of_list(transport: Transport) {
    let Some(mount) = AclMount::new(&new_memory_fs(), transport) else {
        return;
    };
    write(&mount.path("file"));
    mount.chmod("file", 0o600);
    let read = "cat file";
    assert!(!mount.may(USER, read));
    mount.set_acl(&["-m", "u:4321:r"], "file");
    assert!(mount.may(USER, read));
    assert!(!mount.may(OTHER_USER, read));
    assert!(!mount.may(USER, "echo >> file"));
    mount.set_acl(&["-m", "g:4322:rw"], "file");
    assert!(mount.may(OTHER_USER, "echo >> file"));
    mount.chmod("file", 0o640);
    assert!(!mount.may(OTHER_USER, "echo >> file"));
    assert!(mount.may(OTHER_USER, read));
    mount.set_acl(&["-x", "u:4321"], "file");
    assert!(!mount.may(USER, read));
}

fn copies_keep_lists(transport: Transport) {
    let Some(mount) = AclMount::new(&new_memory_fs(), transport) else {
        return;
    };
    std::fs::create_dir(mount.path("from")).unwrap();
    write(&mount.path("from/file"));
    mount.set_acl(&["-m", "u:4321:rw"], "from/file");
    mount.set_acl(&["-d", "-m", "g:4400:rx"], "from");
    let out = run(Command::new("cp")
        .args(["-a", "from", "to"])
        .current_dir(mount.0.dir.path()));
    assert!(out.status.success(), "{out:?}");
    assert_eq!(mount.acl("to"), mount.acl("from"));
    assert_eq!(mount.acl("to/file"), mount.acl("from/file"));
    assert!(mount.acl("to/file").contains("user:4321:rw-"));
    assert!(mount.acl("to").contains("default:group:4400:r-x"));
}

/// An owner outside the group cannot keep set-group-id.
fn foreign_group_loses_setgid(transport: Transport) {
    let Some(mount) = AclMount::new(&new_memory_fs(), transport) else {
        return;
    };
    for (name, group) in [("own", USER), ("foreign", 4400)] {
        write(&mount.path(name));
        std::os::unix::fs::chown(mount.path(name), Some(USER), Some(group)).unwrap();
        mount.chmod(name, 0o2775);
        assert!(mount.may(USER, &format!("setfacl -m u:4322:r {name}")));
    }
    assert_eq!(mount.mode("own"), 0o2775);
    assert_eq!(mount.mode("foreign"), 0o775);
}

/// Each of these tests runs with both transports.
macro_rules! by_both {
    ($($name:ident)*) => {
        mod classic {
            $(#[test]
            fn $name() {
                super::$name(pagemesh_fuse::Transport::Classic);
            })*
        }
        mod io_uring {
            $(#[test]
            fn $name() {
                super::$name(pagemesh_fuse::Transport::IoUring);
            })*
        }
    };
}

by_both! {
    lists_outlive_the_mount_and_follow_chmod
    new_files_get_default_list_or_umask
    kernel_grants_rights_of_list
    copies_keep_lists
    foreign_group_loses_setgid
}
