//! Compares the OpenAPI document with the server: the server serves every request in the document
//! and accepts every example.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use schemars::generate::SchemaSettings;
use serde_json::{Value, json};
use vmferry::destination::FetchProgress;
use vmferry::estimate::Estimate;
use vmferry::source::Progress;
use vmferry_api::SourceStats;
use vmferry_control::{
    Answer, ChangeRequest, ControlError, EstimateRequest, Handler, MigrateRequest, OPENAPI,
    Replies, Request, Server,
};

/// A handler that records its requests.
#[derive(Default)]
struct RequestRecorder(Mutex<Vec<Request>>);

impl Handler for RequestRecorder {
    fn handle(&self, request: Request, replies: &Replies) -> Result<Answer, ControlError> {
        if let Request::Migrate(_) = request {
            replies.event(&json!({ "event": "started" })).unwrap();
        }
        self.0.lock().unwrap().push(request);
        Ok(json!({}).into())
    }
}

fn start_server() -> (tempfile::TempDir, PathBuf, Server, Arc<RequestRecorder>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.sock");
    let recorder = Arc::new(RequestRecorder::default());
    let server = Server::bind(&path, Arc::<RequestRecorder>::clone(&recorder)).unwrap();
    (directory, path, server, recorder)
}

/// Sends a request like an ordinary HTTP client.
fn ask(path: &Path, method: &str, target: &str, body: &str) -> (u16, String, String) {
    let mut socket = UnixStream::connect(path).unwrap();
    let length = body.len();
    write!(
        socket,
        "{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_owned(), body.to_owned())
}

fn document() -> Value {
    serde_json::from_str(OPENAPI).unwrap()
}

/// The document with the schemas of the current types.
fn generated() -> Value {
    let settings = || {
        SchemaSettings::draft2020_12()
            .with(|settings| settings.definitions_path = "/components/schemas".into())
    };
    let mut requests = settings().into_generator();
    requests.subschema_for::<MigrateRequest>();
    requests.subschema_for::<ChangeRequest>();
    requests.subschema_for::<EstimateRequest>();
    let mut answers = settings().for_serialize().into_generator();
    answers.subschema_for::<ControlError>();
    answers.subschema_for::<Estimate>();
    answers.subschema_for::<Progress>();
    answers.subschema_for::<FetchProgress>();
    answers.subschema_for::<SourceStats>();
    let mut document = document();
    let schemas = document["components"]["schemas"].as_object_mut().unwrap();
    // The status is defined by each VMM, and events vary. Their schemas are written by hand.
    schemas.retain(|name, _| ["Status", "Event"].contains(&name.as_str()));
    schemas.extend(requests.take_definitions(true));
    schemas.extend(answers.take_definitions(true));
    // A destination is required, although the type has a default.
    let migrate = &mut schemas["MigrateRequest"];
    migrate["required"] = json!(["to"]);
    migrate["properties"]["to"].as_object_mut().unwrap().remove("default");
    document
}

/// To regenerate the document, run `cargo test -p vmferry-control --test document -- --ignored`.
#[test]
fn document_has_the_schemas_of_the_types() {
    assert_eq!(document(), generated(), "write it again: see the comment");
}

#[test]
#[ignore = "writes the document"]
fn write_the_document() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi.json");
    std::fs::write(path, serde_json::to_string_pretty(&generated()).unwrap() + "\n").unwrap();
}

/// The schema with this name and all schemas that it refers to.
fn schema(name: &str) -> jsonschema::Validator {
    let document = document();
    let mut schema = json!({ "$ref": format!("#/components/schemas/{name}") });
    schema["components"] = document["components"].clone();
    jsonschema::draft202012::new(&schema).unwrap()
}

/// The method, path and example of each operation.
fn operations() -> Vec<(String, String, Value)> {
    let document = document();
    let mut all = Vec::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let example =
                operation["requestBody"]["content"]["application/json"]["example"].clone();
            all.push((method.to_uppercase(), path.clone(), example));
        }
    }
    all
}

#[test]
fn document_operations_are_served() {
    let (_directory, path, _server, recorder) = start_server();
    let operations = operations();
    assert_eq!(operations.len(), 14);
    for (method, target, example) in &operations {
        let body = if example.is_null() { String::new() } else { example.to_string() };
        let (status, head, _) = ask(&path, method, target, &body);
        assert_eq!(status, 200, "{method} {target}");
        let streamed = head.contains("application/x-ndjson");
        assert_eq!(
            streamed,
            (method.as_str(), target.as_str()) == ("PUT", "/api/v1/migration"),
            "{head}"
        );
    }
    // The handler never sees the request for the document.
    assert_eq!(recorder.0.lock().unwrap().len(), operations.len() - 1);
}

#[test]
fn document_is_served_verbatim() {
    let (_directory, path, _server, _) = start_server();
    let (status, _, body) = ask(&path, "GET", "/api/v1/openapi.json", "");
    assert_eq!((status, body.as_str()), (200, OPENAPI));
}

#[test]
fn unknown_requests_are_refused_with_the_documented_error() {
    let (_directory, path, _server, _) = start_server();
    let error = schema("Error");
    for (method, target, body, expected) in [
        ("PUT", "/api/v1/guest", "", 404),
        ("GET", "/", "", 404),
        ("PATCH", "/api/v1/migration", r#"{"speed":1}"#, 400),
        ("PUT", "/api/v1/migration", "{", 400),
    ] {
        let (status, _, body) = ask(&path, method, target, body);
        assert_eq!(status, expected, "{method} {target}");
        let answer: Value = serde_json::from_str(&body).unwrap();
        assert!(error.is_valid(&answer["error"]), "{answer}");
    }
}

#[test]
fn requests_match_their_schemas() {
    let migrate = schema("MigrateRequest");
    let request = MigrateRequest { to: "unix:/in".into(), ..MigrateRequest::default() };
    let body = serde_json::to_value(&request).unwrap();
    if let Err(error) = migrate.validate(&body) {
        panic!("{error}: {body}");
    }
    // Each member of the schema is written by default, unless it is absent by default.
    let document = document();
    let members =
        document["components"]["schemas"]["MigrateRequest"]["properties"].as_object().unwrap();
    for name in members.keys() {
        let absent = ["addresses", "downtime_abort_ms", "protocol", "witness", "record"];
        let optional = absent.contains(&name.as_str());
        assert!(optional || body.get(name).is_some(), "{name}");
    }
    assert!(body.as_object().unwrap().keys().all(|name| members.contains_key(name)), "{body}");
    // The defaults in the schema are the values written by default.
    for (name, schema) in members {
        if let Some(default) = schema.get("default") {
            assert_eq!(&body[name], default, "{name}");
        }
    }
    for (body, valid) in [
        (json!({ "to": "x" }), true),
        (json!({}), false),
        (json!({ "to": "x", "channels": 17 }), false),
        (json!({ "to": "x", "freeze": true }), false),
    ] {
        assert_eq!(migrate.is_valid(&body), valid, "{body}");
    }
}

#[test]
fn answers_match_their_schemas() {
    let progress = serde_json::to_value(vmferry::source::Progress::default()).unwrap();
    let estimate = serde_json::to_value(vmferry::estimate::Estimate::default()).unwrap();
    let fetch = FetchProgress { eta_ms: Some(1.5), ..FetchProgress::default() };
    let fetch = serde_json::to_value(fetch).unwrap();
    let uuid = "05050505-0505-0505-0505-050505050505";
    let status = |fetch: &Value| {
        json!({
            "name": "web", "uuid": uuid, "memory_bytes": 4096, "pid": 7, "migration": null,
            "fetch": fetch,
        })
    };
    // A guest that has all its pages, and one that fetches some.
    let (complete, fetching) = (status(&Value::Null), status(&fetch));
    for (name, answer) in [
        ("Progress", progress),
        ("Estimate", estimate),
        ("FetchProgress", fetch),
        ("Status", complete),
        ("Status", fetching),
    ] {
        if let Err(error) = schema(name).validate(&answer) {
            panic!("{name}: {error}: {answer}");
        }
    }
}
