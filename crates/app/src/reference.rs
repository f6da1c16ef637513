//! The pages of the book that are generated: the command line from clap, REST from the OpenAPI
//! document, metrics from their catalogue.
//!
//! Invariant: the checked-in pages are those that this module generates; a test compares them.

use crate::commands::Cli;
use clap::{Arg, Command, CommandFactory};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// The command that writes the generated pages.
const COMMAND: &str = "cargo xtask reference";
/// The environment variable by which that command makes tests write their pages.
const WRITE: &str = "PAGEMESH_WRITE_REFERENCE";

/// The page of the command line.
fn command_line() -> String {
    let mut command = Cli::command();
    command.build();
    let mut page = head("command line of `pagemesh`", "Command line");
    page += "`pagemesh COMMAND --help` prints the same texts. Sizes take a number and a unit, as `512M` or `2G`\n\
             (powers of 1024). A variable in the column of defaults sets the option if the option is missing.\n";
    let commands = visible_commands(&command, "pagemesh");
    page += "\n## Commands\n\n";
    for (path, command) in &commands {
        let about = text(command.get_about().map(ToString::to_string));
        let anchor = path.replace(' ', "-");
        page += &format!("- [`{path}`](#{anchor}): {about}\n");
    }
    page += "\n## Common options\n\nCommands that call the manager take these options.\n\n";
    let (_, with_all) = commands
        .iter()
        .find(|(path, _)| path == "pagemesh status")
        .expect("a command that calls the manager");
    page += &argument_table(with_all.get_arguments().filter(|arg| is_common(arg)));
    for (path, command) in &commands {
        page += &command_section(path, command);
    }
    page
}

/// All commands that do not only hold others, with their words.
fn visible_commands<'a>(command: &'a Command, path: &str) -> Vec<(String, &'a Command)> {
    let below = command
        .get_subcommands()
        .filter(|it| !it.is_hide_set() && it.get_name() != "help");
    let mut found = vec![];
    if path != "pagemesh" && !command.is_subcommand_required_set() {
        found.push((path.to_owned(), command));
    }
    for inner in below {
        found.extend(visible_commands(
            inner,
            &format!("{path} {}", inner.get_name()),
        ));
    }
    found
}

/// Whether an argument is an option of all commands that call the manager.
fn is_common(argument: &Arg) -> bool {
    ["manager", "key", "token_file", "output"].contains(&argument.get_id().as_str())
        && argument.is_global_set()
}

fn command_section(path: &str, command: &Command) -> String {
    let about = command.get_long_about().or(command.get_about());
    let about = about.map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().bin_name(path).render_usage().to_string();
    let usage = usage.replace("Usage: ", "");
    let mut section = format!(
        "\n## `{path}`\n\n{}\n\n```text\n{usage}\n```\n",
        about.trim()
    );
    let is_shown = |arg: &&Arg| !arg.is_hide_set() && !is_common(arg) && arg.get_id() != "help";
    let own: Vec<&Arg> = command.get_arguments().filter(is_shown).collect();
    if !own.is_empty() {
        section += &format!("\n{}", argument_table(own.into_iter()));
    }
    if command.get_arguments().any(is_common) {
        section += "\nAlso the [common options](#common-options).\n";
    }
    section
}

fn argument_table<'a>(arguments: impl Iterator<Item = &'a Arg>) -> String {
    let mut table = "| argument | default | meaning |\n|---|---|---|\n".to_owned();
    for argument in arguments {
        table += &format!(
            "| `{}` | {} | {} |\n",
            argument_name(argument),
            argument_default(argument),
            argument_meaning(argument)
        );
    }
    table
}

fn argument_name(argument: &Arg) -> String {
    let takes_value = argument.get_action().takes_values();
    let values = argument.get_value_names().unwrap_or_default();
    let value = values.first().map_or_else(String::new, ToString::to_string);
    match (argument.get_long(), takes_value) {
        (None, _) if argument.is_trailing_var_arg_set() => format!("{value}..."),
        (None, _) => value,
        (Some(long), true) if argument.is_require_equals_set() => format!("--{long}[={value}]"),
        (Some(long), true) => format!("--{long} {value}"),
        (Some(long), false) => format!("--{long}"),
    }
}

fn argument_default(argument: &Arg) -> String {
    let values = argument.get_default_values();
    let quoted = values
        .iter()
        .map(|it| format!("`{}`", it.to_string_lossy()));
    let mut parts: Vec<String> = if argument.get_action().takes_values() {
        quoted.collect()
    } else {
        vec![]
    };
    if argument.is_required_set() {
        parts.push("required".into());
    }
    if let Some(variable) = argument.get_env() {
        parts.push(format!("`${}`", variable.to_string_lossy()));
    }
    parts.join(", ")
}

fn argument_meaning(argument: &Arg) -> String {
    let help = argument.get_long_help().or(argument.get_help());
    let mut meaning = text(help.map(ToString::to_string));
    let possible = argument.get_possible_values();
    if argument.get_action().takes_values() && !possible.is_empty() {
        let shown = possible.iter().filter(|it| !it.is_hide_set()).map(|it| {
            let help = it.get_help().map(|help| text(Some(help.to_string())));
            let help = help.map(|help| format!(" ({})", help.trim_end_matches('.')));
            format!("`{}`{}", it.get_name(), help.unwrap_or_default())
        });
        let end = if meaning.ends_with('.') { "" } else { "." };
        let shown = shown.collect::<Vec<_>>().join(", ");
        meaning += &format!("{end} Values: {shown}.");
    }
    meaning
}

/// One line of a table.
fn text(help: Option<String>) -> String {
    let joined = help.unwrap_or_default();
    let words: Vec<&str> = joined.split_whitespace().collect();
    words.join(" ").replace('|', "\\|").replace('<', "&lt;")
}

/// The page of the REST API.
fn rest() -> String {
    let document = pagemesh_manage::api::document::document();
    let mut page = head("manager's OpenAPI document", "REST");
    page += &text(document["info"]["description"].as_str().map(str::to_owned));
    page += "\n\nThe manager serves this API over HTTP, and the document itself at `GET /api/v1/openapi.json`. Every request\n\
             but `GET /healthz` and the login carries `Authorization: Bearer TOKEN`; [Keys](../operations/keys.md#roles-and-tokens)\n\
             shows how to get the token, and what each role may do. Bodies are JSON, and so is every refusal: an [`Error`](#error), with one of these\n\
             [codes](#errorcode). The section of a call has its own statuses; the [common answers](#common-answers) apply to many calls. A path\n\
             that does not exist answers 404 (`not-found`), a method that a path does not take 405 (`wrong-method`).\n";
    page += &common_answers(&document);
    for (path, methods) in object(&document["paths"]) {
        for (method, operation) in object(methods) {
            if operation["responses"].is_object() {
                page += &endpoint(&method.to_uppercase(), path, operation);
            }
        }
    }
    page += "\n## Types\n";
    for (name, schema) in object(&document["components"]["schemas"]) {
        page += &type_section(name, schema);
    }
    page
}

/// The table of the answers that calls refer to.
fn common_answers(document: &Value) -> String {
    let paths = object(&document["paths"]).values();
    let operations = paths.flat_map(|methods| object(methods).values());
    let responses = operations.filter_map(|operation| operation["responses"].as_object());
    let mut statuses = BTreeMap::new();
    for (status, response) in responses.flatten() {
        if let Some(reference) = response["$ref"].as_str() {
            let code = reference.rsplit('/').next().unwrap_or_default();
            statuses.insert(status, code);
        }
    }
    let mut section = "\n## Common answers\n\n[Limits](limits.md#the-manager) has the sizes, numbers and times behind them.\n\n\
                       | status | code | meaning |\n|---|---|---|\n"
        .to_owned();
    for (status, code) in statuses {
        let meaning = described(&document["components"]["responses"][code]);
        section += &format!("| {status} | `{code}` | {meaning} |\n");
    }
    section
}

fn object(value: &Value) -> &Map<String, Value> {
    value.as_object().expect("an object")
}

fn described(value: &Value) -> String {
    text(value["description"].as_str().map(str::to_owned))
}

fn endpoint(method: &str, path: &str, operation: &Value) -> String {
    let texts = ["summary", "description"].map(|key| operation[key].as_str());
    let texts: Vec<&str> = texts.into_iter().flatten().map(str::trim).collect();
    let mut section = format!("\n## `{method} {path}`\n\n{}\n", texts.join("\n\n"));
    section += &format!("\n{}\n", role_line(operation));
    let parameters = operation["parameters"].as_array();
    if let Some(parameters) = parameters.filter(|it| !it.is_empty()) {
        section += "\n| parameter | in | type | meaning |\n|---|---|---|---|\n";
        for parameter in parameters {
            section += &format!(
                "| `{}` | {} | {} | {} |\n",
                parameter["name"].as_str().unwrap_or_default(),
                parameter["in"].as_str().unwrap_or_default(),
                type_name(&parameter["schema"]),
                described(parameter)
            );
        }
    }
    let body = &operation["requestBody"]["content"]["application/json"]["schema"];
    if body.is_object() {
        section += &format!("\nBody: {}\n", type_name(body));
    }
    section += "\n| status | body | meaning |\n|---|---|---|\n";
    let responses = object(&operation["responses"]).iter();
    for (status, response) in responses.filter(|(_, it)| it["$ref"].is_null()) {
        let content = response["content"].as_object();
        let schema = content.and_then(|it| it.values().next());
        let body = schema.map_or_else(String::new, |it| type_name(&it["schema"]));
        let meaning = described(response);
        section += &format!("| {status} | {body} | {meaning} |\n");
    }
    section
}

/// The role that a call needs, from its security requirement.
fn role_line(operation: &Value) -> String {
    match operation["security"][0]["token"][0].as_str() {
        Some(role) => format!("Role: `{role}`."),
        None => "Role: none needed.".into(),
    }
}

/// A type, with a link to its section if it has one.
fn type_name(schema: &Value) -> String {
    if let Some(reference) = schema["$ref"].as_str() {
        let name = reference.rsplit('/').next().unwrap_or_default();
        return format!("[`{name}`](#{})", name.to_lowercase());
    }
    for key in ["oneOf", "allOf", "anyOf"] {
        if let Some(choices) = schema[key].as_array() {
            let names: Vec<String> = choices.iter().map(type_name).collect();
            return names.join(" or ");
        }
    }
    let name = match &schema["type"] {
        Value::String(name) => name.clone(),
        Value::Array(names) => {
            let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
            names.join(" or ")
        }
        _ => String::new(),
    };
    match (name.as_str(), schema["format"].as_str()) {
        ("array", _) => format!("array of {}", type_name(&schema["items"])),
        (_, Some(format)) => format!("{name} ({format})"),
        _ => name,
    }
}

fn type_section(name: &str, schema: &Value) -> String {
    let mut section = format!("\n### `{name}`\n\n{}\n", described(schema));
    if let Some(properties) = schema["properties"].as_object() {
        section += "\n| field | type | required | meaning |\n|---|---|---|---|\n";
        let required = schema["required"].as_array().cloned().unwrap_or_default();
        for (field, its_type) in properties {
            let is_required = required.iter().any(|it| it == field.as_str());
            section += &format!(
                "| `{field}` | {} | {} | {} |\n",
                type_name(its_type),
                if is_required { "yes" } else { "" },
                described(its_type)
            );
        }
    } else if let Some(choices) = schema["oneOf"].as_array() {
        section += "\nOne of:\n\n";
        for choice in choices {
            section += &format!("- {}\n", variant(choice));
        }
    } else if let Some(values) = schema["enum"].as_array() {
        let values: Vec<String> = values.iter().map(|it| format!("`{it}`")).collect();
        section += &format!("\nOne of {}.\n", values.join(", "));
    } else {
        let pattern = schema["pattern"].as_str();
        let pattern = pattern.map_or_else(String::new, |it| format!(" that matches `{it}`"));
        section += &format!("\nA JSON {}{pattern}.\n", type_name(schema));
    }
    section
}

/// One choice of an enumeration.
fn variant(choice: &Value) -> String {
    let meaning = match described(choice) {
        empty if empty.is_empty() => String::new(),
        given => format!(": {given}"),
    };
    if let Some(values) = choice["enum"].as_array() {
        let values: Vec<String> = values.iter().map(|it| format!("`{it}`")).collect();
        return format!("{}{meaning}", values.join(", "));
    }
    if let Some(properties) = choice["properties"].as_object() {
        let fields: Vec<String> = properties
            .iter()
            .map(|(field, its_type)| format!("`{field}`: {}", type_name(its_type)))
            .collect();
        return format!("an object with {}{meaning}", fields.join(", "));
    }
    format!("{}{meaning}", type_name(choice))
}

/// The page of the metrics.
fn metrics() -> String {
    let mut page = head("catalogue of metrics", "Metrics");
    page += "[Monitoring](../operations/monitoring.md) shows how to scrape them. Counters start at 0 with their program. A histogram has\n\
             the series `_bucket`, `_sum` and `_count`; its bounds are the powers of two of nanoseconds from 256 ns to 17 s, in seconds.\n\
             The label `kind` is `read`, `write` or `flush`; `stage` is one of `queue`, `lock`, `fabric`, `brick`, `media`, `finish`\n\
             ([their meaning](../operations/figures.md#where-the-time-of-an-operation-goes)).\n";
    for (program, metrics) in pagemesh_metrics::catalogue::PROGRAMS {
        page +=
            &format!("\n## {program}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n");
        for metric in metrics {
            let labels = metric.labels.iter().map(|label| format!("`{label}`"));
            page += &format!(
                "| `{}` | {} | {} | {} |\n",
                metric.name,
                metric.kind.name(),
                labels.collect::<Vec<_>>().join(", "),
                text(Some(metric.help.to_owned()))
            );
        }
    }
    page
}

/// The note and the title at the top of a page.
fn head(source: &str, title: &str) -> String {
    format!("<!-- Generated by `{COMMAND}` from the {source}. Do not edit. -->\n\n# {title}\n\n")
}

/// Compares a page with its file, or writes it.
#[track_caller]
fn check(file: &str, wanted: &str) {
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference");
    let path = book.join(file);
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, wanted).expect("the page can be written");
        return;
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let stale = wanted.lines().find(|line| !found.contains(*line));
    assert!(
        found == wanted,
        "docs/reference/{file} is not current (first difference: {stale:?}); run `{COMMAND}`"
    );
}

#[test]
fn page_of_command_line_is_current() {
    check("command-line.md", &command_line());
}

#[test]
fn page_of_metrics_is_current() {
    check("metrics.md", &metrics());
}

#[test]
fn page_of_rest_is_current() {
    check("rest.md", &rest());
}
