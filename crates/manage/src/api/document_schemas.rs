//! Corrections of the schemas that derives make for the OpenAPI document.
//!
//! Invariant: a value that a schema admits has a type that the server reads, and the other way round. The derives
//! describe unsigned integers by signed formats, and optional parameters as if they could be null.

use serde_json::{Map, Value, json};

/// Corrects every schema below a value.
pub(super) fn correct(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            correct_integer(fields);
            if let Some(Value::Array(parameters)) = fields.get_mut("parameters") {
                parameters.iter_mut().for_each(correct_parameter);
            }
            fields.values_mut().for_each(correct);
        }
        Value::Array(items) => items.iter_mut().for_each(correct),
        _ => {}
    }
}

/// Gives an unsigned integer the range of its type. Derives give only unsigned ones a minimum.
fn correct_integer(schema: &mut Map<String, Value>) {
    let is_integer = match schema.get("type") {
        Some(Value::String(name)) => name == "integer",
        Some(Value::Array(names)) => names.contains(&json!("integer")),
        _ => false,
    };
    if !is_integer || !schema.contains_key("minimum") {
        return;
    }
    let format = schema.get("format").and_then(Value::as_str);
    let (format, most) = match format {
        Some("int32") => (Some("uint32"), u64::from(u32::MAX)),
        Some("int64") => (Some("uint64"), u64::MAX),
        None => (None, u64::MAX),
        Some(_) => return,
    };
    if let Some(format) = format {
        schema.insert("format".into(), json!(format));
    }
    schema.entry("maximum").or_insert(json!(most));
}

/// A parameter is missing or has a value; it is never null.
fn correct_parameter(parameter: &mut Value) {
    let Some(Value::Array(names)) = parameter.pointer_mut("/schema/type") else {
        return;
    };
    names.retain(|name| name != "null");
    if let [only] = names.as_mut_slice() {
        let only = only.take();
        parameter["schema"]["type"] = only;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(mut given: Value, wanted: &Value) {
        correct(&mut given);
        assert_eq!(given, *wanted);
    }

    #[test]
    fn unsigned_integers_have_their_range() {
        check(
            json!({"schema": {"type": ["integer", "null"], "format": "int64", "minimum": 0}}),
            &json!({"schema": {"type": ["integer", "null"], "format": "uint64", "minimum": 0, "maximum": u64::MAX}}),
        );
        check(
            json!([{"type": "integer", "format": "int32", "minimum": 1}]),
            &json!([{"type": "integer", "format": "uint32", "minimum": 1, "maximum": u32::MAX}]),
        );
        let limited = json!({"type": "integer", "minimum": 1, "maximum": 1000});
        check(limited.clone(), &limited);
        let signed = json!({"type": "integer", "format": "int64"});
        check(signed.clone(), &signed);
    }

    #[test]
    fn parameters_are_never_null() {
        let of = |name: Value| json!({"parameters": [{"name": "x", "schema": {"type": name}}]});
        check(of(json!(["string", "null"])), &of(json!("string")));
        check(of(json!("string")), &of(json!("string")));
    }
}
