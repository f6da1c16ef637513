//! Command lines with configuration files.

use super::*;
use clap::Parser;

/// The words after a file with this text was added to a command line.
fn expanded(line: &str, text: &str, environment: &[(&str, &str)]) -> Result<String, String> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("a.toml");
    std::fs::write(&path, text).expect("written");
    let shown = path.to_str().expect("a text");
    let words = line.replace("FILE", shown);
    let words = words.split(' ').map(OsString::from).collect();
    let variable = |name: &OsStr| {
        let found = environment.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| OsString::from(value))
    };
    match expand(words, variable) {
        Ok((words, _)) => {
            let words: Vec<_> = words.iter().map(|it| it.to_string_lossy()).collect();
            Ok(words.join(" ").replace(shown, "FILE"))
        }
        Err(error) => Err(error.to_string().replace(shown, "FILE")),
    }
}

#[track_caller]
fn gives(line: &str, text: &str, wanted: &str) {
    assert_eq!(expanded(line, text, &[]).as_deref(), Ok(wanted));
}

#[track_caller]
fn refuses(line: &str, text: &str, parts: &[&str]) {
    let error = expanded(line, text, &[]).expect_err("an error");
    for part in parts {
        assert!(error.contains(part), "no '{part}' in: {error}");
    }
}

#[test]
fn file_sets_options_of_each_type() {
    gives(
        "pagemesh mount --config FILE",
        "name = \"home\"\ndir = \"/mnt\"\nthreads = 0x10\ndirect-io = true\nallow-other = false\n",
        "pagemesh mount --threads=16 --direct-io --config FILE -- home /mnt",
    );
    gives(
        "pagemesh export nbd --config FILE",
        "volumes = [\"a\", \"b\"]\nsocket = \"/s\"\n",
        "pagemesh export nbd --socket=/s --config FILE -- a b",
    );
}

#[test]
fn flag_of_file_is_taken_back() {
    let file = "name = \"home\"\ndirect-io = true\n";
    gives(
        "pagemesh mount --config FILE --direct-io=false",
        file,
        "pagemesh mount --config FILE -- home",
    );
    gives(
        "pagemesh mount --config FILE --direct-io=true --key --direct-io=false -- --allow-other=false",
        "direct-io = false\n",
        "pagemesh mount --config FILE --direct-io --key --direct-io=false -- --allow-other=false",
    );
    for wrong in ["--direct-io=maybe", "--threads=false", "--help=false"] {
        let line = format!("pagemesh mount {wrong} home /mnt");
        gives(&line, "", &line);
    }
}

#[test]
fn command_line_precedes_file() {
    let file = "pool = \"/a\"\nlisten = \"1.1.1.1:1\"\n";
    gives(
        "pagemesh brick --config=FILE --pool /b",
        file,
        "pagemesh brick --listen=1.1.1.1:1 --config=FILE --pool /b",
    );
    gives(
        "pagemesh mount home --config FILE --threads 8",
        "name = \"other\"\ndir = \"/mnt\"\nthreads = 2\n",
        "pagemesh mount home --config FILE --threads 8 -- /mnt",
    );
    // An alternative of which there can be only one.
    gives(
        "pagemesh export nbd a --socket /s --config FILE",
        "listen = \"1.1.1.1:1\"\n",
        "pagemesh export nbd a --socket /s --config FILE",
    );
}

#[test]
fn environment_precedes_file_unless_empty() {
    let line = "pagemesh manager --config FILE";
    let file = "key = \"/k\"";
    let with = |value| expanded(line, file, &[("PAGEMESH_KEY", value)]);
    assert_eq!(with("/other").as_deref(), Ok(line));
    let set = "pagemesh manager --key=/k --config FILE";
    assert_eq!(with("").as_deref(), Ok(set));
}

#[test]
fn unknown_key_is_refused_with_nearest() {
    let parts = ["FILE:2", "'lisen'", "'listen'"];
    refuses("pagemesh manager --config FILE", "\nlisen = \"a\"", &parts);
    let parts = ["FILE:1", "'scrub_every'", "'scrub-every'"];
    refuses(
        "pagemesh brick --config FILE",
        "scrub_every = \"1d\"",
        &parts,
    );
    // Hidden options and those of one call are no keys.
    for key in [
        "until-stdin-ends = true",
        "config = \"x\"",
        "output = \"json\"",
    ] {
        refuses("pagemesh brick --config FILE", key, &["unknown"]);
    }
}

#[test]
fn token_of_daemon_is_refused_with_way_out() {
    let file = "manager = \"http://m:1\"\ntoken-file = \"/t\"\n";
    for daemon in ["brick", "mount", "export nbd"] {
        let line = format!("pagemesh {daemon} --config FILE");
        let parts = ["FILE:2", "'token-file'", "cluster key", "--key"];
        refuses(&line, file, &parts);
    }
    let parts = ["--token-file", "cluster key"];
    refuses("pagemesh mount a /mnt --token-file FILE", "", &parts);
    let other = "pagemesh brick list --token-file FILE";
    gives(other, "", other);
}

#[test]
fn manager_of_client_file_replaces_default_only() {
    let manager = |line: &str| {
        let words = line.split(' ').map(OsString::from).collect();
        let named = || Ok(Some("http://10.0.0.1:7070".to_owned()));
        let cli = parse(words, named).expect("no file").expect("a right line");
        match cli.command {
            crate::commands::Command::Status { client } => client.manager,
            crate::commands::Command::Brick(args) => args.client.manager,
            _ => panic!("another command"),
        }
    };
    for line in ["status", "brick list", "brick --pool /p"] {
        assert_eq!(manager(&format!("pagemesh {line}")), "http://10.0.0.1:7070");
    }
    assert_eq!(
        manager("pagemesh status --manager http://m:1"),
        "http://m:1"
    );
    assert_eq!(
        manager("pagemesh brick list --manager http://m:1"),
        "http://m:1"
    );
}

#[test]
fn invalid_client_file_stops_commands_of_cluster_only() {
    let parsed = |line: &str| {
        let words = line.split(' ').map(OsString::from).collect();
        let place = "client.toml:1".to_owned();
        parse(words, || Err(ConfigError::TokenOfDaemon { place }))
    };
    assert!(parsed("pagemesh status").is_err());
    for line in [
        "pagemesh pool show /p",
        "pagemesh doctor",
        "pagemesh status --manager http://m:1",
    ] {
        assert!(parsed(line).is_ok(), "{line}");
    }
}

#[test]
fn wrong_type_is_refused_with_line() {
    for (text, part) in [
        ("threads = \"4\"", "a number, as threads = 4"),
        ("threads = 4.5", "a number"),
        ("dir = 4", "a string in quotes"),
        ("direct-io = \"yes\"", "true or false"),
        ("dir = [\"/a\"]", "a string"),
        ("[name]\na = 1", "a string"),
        ("threads = 99999999999999999999", "a number"),
    ] {
        refuses("pagemesh mount --config FILE", text, &["FILE:1", part]);
    }
    let many = "pagemesh export nbd --config FILE";
    refuses(many, "\n\nvolumes = [1]", &["FILE:3", "strings"]);
}

#[test]
fn file_that_is_no_toml_is_refused() {
    let line = "pagemesh manager --config FILE";
    for text in ["listen", "a = 1\na = 2", "= 3", "listen = \"a", "\u{0}"] {
        refuses(line, text, &["FILE:"]);
    }
    let error = expanded("pagemesh manager --config /nowhere/x", "", &[]);
    assert!(error.expect_err("an error").contains("cannot be read"));
    let error = expanded("pagemesh manager --config /dev/zero", "", &[]);
    assert!(error.expect_err("an error").contains("regular file"));
    let long = "#".repeat(300 << 10);
    let error = expanded(line, &long, &[]);
    assert!(error.expect_err("an error").contains("256 KiB"));
}

#[test]
fn gap_between_positionals_is_refused() {
    let line = "pagemesh mount --config FILE";
    refuses(line, "dir = \"/mnt\"", &["FILE:1", "'name'"]);
}

#[test]
fn other_commands_have_no_file() {
    for line in [
        "pagemesh brick list --config FILE",
        "pagemesh status --config FILE",
    ] {
        gives(line, "nonsense", line);
    }
}

#[test]
fn wrong_value_is_traced_to_its_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("a.toml");
    std::fs::write(&path, "pool = \"/p\"\n\nname = \"-\"\n").expect("written");
    let words = ["pagemesh", "brick", "--config"]
        .map(OsString::from)
        .to_vec();
    let words = [words, vec![path.into_os_string()]].concat();
    let (words, source) = expand(words, |_| None).expect("known keys");
    let error = Cli::try_parse_from(words).err().expect("a wrong name");
    let source = source.expect("a file");
    let entry = source.entry_of(&error).expect("its entry");
    assert_eq!((entry.key.as_str(), entry.line), ("name", 3));
}
