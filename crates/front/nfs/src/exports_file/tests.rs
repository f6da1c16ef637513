use super::*;
use proptest::prelude::*;

fn parse_text(text: &str) -> Result<Vec<ExportLine>, ExportsFileError> {
    ExportsFile::parse("exports", text.as_bytes()).map(|file| file.exports)
}

fn one(text: &str) -> ExportLine {
    let mut exports = parse_text(text).expect("exports");
    assert_eq!(exports.len(), 1, "{exports:?}");
    exports.remove(0)
}

#[track_caller]
fn check_mistake(text: &str, place: (usize, usize), part: &str) {
    let error = parse_text(text).expect_err("a mistake");
    assert_eq!((error.line, error.column), place, "{error}");
    let message = error.to_string();
    let prefix = format!("exports:{}:{}: ", place.0, place.1);
    assert!(message.starts_with(&prefix), "{message}");
    assert!(message.contains(part), "{message}");
}

#[test]
fn defaults_are_those_of_exports_5() {
    let export = one("/data *");
    let wanted = ExportOptions {
        is_read_only: true,
        squash: Squash::Root,
        anonymous_uid: 65_534,
        anonymous_gid: 65_534,
        needs_reserved_port: true,
        manages_groups: false,
    };
    assert_eq!(export.rules[0].options, wanted);
    assert_eq!(export.rules[0].clients, ClientPattern::All);
    assert_eq!(export.path.to_string(), "/data");
}

#[test]
fn options_set_their_fields() {
    let export = one("/d *(rw,all_squash,anonuid=5,anongid=6,insecure,manage_gids,sync,sec=sys)");
    let wanted = ExportOptions {
        is_read_only: false,
        squash: Squash::All,
        anonymous_uid: 5,
        anonymous_gid: 6,
        needs_reserved_port: false,
        manages_groups: true,
    };
    assert_eq!(export.rules[0].options, wanted);
}

#[test]
fn most_specific_rule_is_the_first() {
    let export = one("/d * 10.0.0.0/8 10.1.0.0/16(rw) 10.1.2.3 fd00::/8 fd00::1 0.0.0.0/0");
    let order: Vec<String> = export
        .rules
        .iter()
        .map(|it| it.clients.to_string())
        .collect();
    let wanted = [
        "fd00::1",
        "10.1.2.3",
        "10.1.0.0/16",
        "10.0.0.0/8",
        "fd00::/8",
        "0.0.0.0/0",
        "*",
    ];
    assert_eq!(order, wanted);
}

#[test]
fn words_have_quotes_escapes_comments_and_continuations() {
    let text = "# comment \\\n\n  /a \\\n\t10.0.0.1(rw) \\\n 10.0.0.2 # end\r\n\"/b/with space\" *\n/c\\040d/\\303\\266 *";
    let exports = parse_text(text).expect("exports");
    let found: Vec<_> = exports
        .iter()
        .map(|it| (it.line, it.path.to_string(), it.rules.len()))
        .collect();
    let wanted = [
        (3, "/a".into(), 2),
        (6, "/b/with space".into(), 1),
        (7, "/c d/ö".into(), 1),
    ];
    assert_eq!(found, wanted);
    assert_eq!(parse_text(""), Ok(vec![]));
    assert_eq!(parse_text("\n \n#"), Ok(vec![]));
}

#[test]
fn mistakes_name_their_place_and_the_way_out() {
    check_mistake("/a *\n/b 10.0.0.1(rv)", (2, 4), "\"rv\"; use ro, rw");
    check_mistake("/a *\n\n  b *", (3, 3), "\"b\" is no path");
    check_mistake("/a\n", (1, 1), "/a has no clients");
    check_mistake("/a *\n/b *\n/a *", (3, 1), "line 1 exports /a");
    check_mistake("/a 10.0.0.1 (rw)", (1, 13), "remove the space");
    check_mistake("/a *(rw", (1, 4), "no end");
    check_mistake("/a *(rw, no_root_squash)", (1, 4), "no end");
    check_mistake("/a *(rw)x", (1, 4), "no end");
    check_mistake("/a *(rw,ro)", (1, 4), "\"ro\" contradicts");
    check_mistake("/a *(rw,rw)", (1, 4), "\"rw\" contradicts");
    check_mistake("/a *(root_squash,all_squash)", (1, 4), "all_squash");
    check_mistake("/a *(anonuid=x)", (1, 4), "has no id");
    check_mistake("/a *(anonuid=)", (1, 4), "has no id");
    check_mistake("/a *(anongid=4294967295)", (1, 4), "has no id");
    check_mistake("/a *(async)", (1, 4), "each reply follows");
    check_mistake("/a *(sec=krb5)", (1, 4), "AUTH_SYS");
    check_mistake("/a *()", (1, 4), "no option \"\"");
    check_mistake("/a host.example.org(rw)", (1, 4), "are not looked up");
    check_mistake("/a \\\n 10.1.0.0/8(rw)", (2, 2), "write 10.0.0.0/8");
    check_mistake("/a 10.0.0.1 10.0.0.1/32(rw)", (1, 13), "has a rule");
    check_mistake("/a * \"x", (1, 6), "quote");
    check_mistake("/a\\400 *", (1, 3), "octal");
    check_mistake("/a\\x *", (1, 3), "octal");
    check_mistake("/a\\000 *", (1, 1), "'\\0'");
    check_mistake("/a\\377 *", (1, 1), "UTF-8");
    check_mistake("/a\u{1} *", (1, 3), "'\\u{1}'");
    for path in ["/", "//a", "/a/", "/a/../b", "/a/./b", "/.."] {
        check_mistake(&format!("{path} *"), (1, 1), "is no path");
    }
    let error = ExportsFile::parse("x", b"/a *\n/b \xff").unwrap_err();
    assert_eq!((error.line, error.cause), (2, ExportsFileCause::NotUtf8));
}

#[test]
fn limits_of_bytes_exports_and_rules_are_errors() {
    let long = " ".repeat(EXPORTS_FILE_BYTES_MAX + 1);
    check_mistake(&long, (1, 1), "bytes");
    let lines = |count| -> String { (0..count).map(|it| format!("/{it} *\n")).collect() };
    assert_eq!(parse_text(&lines(EXPORTS_MAX)).map(|it| it.len()), Ok(1000));
    check_mistake(&lines(EXPORTS_MAX + 1), (1001, 1), "1000 exports");
    let clients = |count: usize| -> String {
        let addresses = (0..count).map(|it| format!(" 10.0.{}.{}", it / 256, it % 256));
        addresses.collect()
    };
    let most = format!("/a{}\n", clients(EXPORT_RULES_MAX));
    assert_eq!(one(&most).rules.len(), EXPORT_RULES_MAX);
    let more = format!("/a{}", clients(EXPORT_RULES_MAX + 1));
    check_mistake(&more, (1, 1), "clients");
    let count = RULES_MAX / EXPORT_RULES_MAX;
    let line = |at| format!("/{at}{}\n", clients(EXPORT_RULES_MAX));
    let full: String = (0..count).map(line).collect();
    assert!(parse_text(&full).is_ok());
    check_mistake(&format!("{full}/x *"), (count + 1, 1), "of all");
}

/// A word as a file has it.
fn quoted(text: &str) -> String {
    let escape = |it: char| match it {
        '"' | '\\' => format!("\\{:03o}", it as u32),
        other => other.to_string(),
    };
    format!("\"{}\"", text.chars().map(escape).collect::<String>())
}

proptest! {
    #[test]
    fn written_exports_are_read_again(
        names in prop::collection::vec("[a-z# \"\\\\(]{1,9}", 1..4),
        host: u32,
        prefix in 0u8..=32,
        is_writable: bool,
        is_secure: bool,
        uid in 0..u32::MAX,
    ) {
        let path = format!("/{}", names.join("/"));
        let network = ClientPattern::host(std::net::Ipv4Addr::from_bits(host).into());
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        let base = std::net::Ipv4Addr::from_bits(host & mask);
        let options = format!(
            "{},anonuid={uid},{}",
            if is_writable { "rw" } else { "ro" },
            if is_secure { "secure" } else { "insecure" },
        );
        let text = format!("{} {network} {base}/{prefix}({options})", quoted(&path));
        if prefix == 32 {
            prop_assert!(parse_text(&text).is_err());
            return Ok(());
        }
        let export = one(&text);
        prop_assert_eq!(export.path.to_string(), path);
        prop_assert_eq!(export.rules[0].clients, network);
        let rule = &export.rules[1];
        prop_assert!(rule.clients.matches(base.into()));
        prop_assert_eq!(rule.options.is_read_only, !is_writable);
        prop_assert_eq!(rule.options.needs_reserved_port, is_secure);
        prop_assert_eq!(rule.options.anonymous_uid, uid);
    }
}
