//! The metrics that a process serves, as a scraper reads them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::str::FromStr;

/// The page at a URL that a process printed.
pub fn page(line: &str) -> String {
    let url = line.strip_prefix("metrics http://").unwrap();
    let address = url.strip_suffix("/metrics").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    body.to_owned()
}

/// A whole number.
#[track_caller]
pub fn value(page: &str, sample: &str) -> u64 {
    parse(page, sample)
}

/// A real number, as of seconds.
#[track_caller]
pub fn real(page: &str, sample: &str) -> f64 {
    parse(page, sample)
}

#[track_caller]
fn parse<T: FromStr>(page: &str, sample: &str) -> T {
    let start = format!("{sample} ");
    let found = page.lines().find_map(|line| line.strip_prefix(&start));
    let parsed = found.and_then(|it| it.parse().ok());
    parsed.unwrap_or_else(|| panic!("no number {sample} in\n{page}"))
}

/// Pages of acknowledged changes of the mounted file system `files` that are not stored yet.
#[track_caller]
pub fn uncommitted_pages(page: &str) -> u64 {
    value(page, "pagemesh_client_uncommitted_pages{volume=\"files\"}")
}
