//! How this release writes requests, and which ones it refuses.

use std::time::Duration;

use super::*;
use crate::http::{RawRequest, read_request, request_text};
use crate::migrate::{RecordRequest, TlsFiles};

fn raw(method: &str, path: &str, body: &str) -> RawRequest {
    RawRequest { method: method.into(), path: path.into(), body: body.into() }
}

fn every_option() -> MigrateRequest {
    let mut tls = TlsFiles::in_directory("/t".as_ref());
    tls.destination_id = Some("spiffe://x".into());
    MigrateRequest {
        to: "tls:b:7001".into(),
        tls: Some(tls),
        addresses: vec!["192.0.2.1".parse().unwrap()],
        channels: 16,
        downtime_limit: Duration::from_micros(300),
        downtime_abort: Some(Duration::from_secs(4)),
        max_bandwidth: Some(1 << 20),
        max_rounds: 3,
        reconnect_timeout: Duration::ZERO,
        timeout: Some(Duration::from_secs(60)),
        when_stuck: vmferry::config::WhenStuck::SwitchOver,
        post_copy: vmferry::config::PostCopy::Never,
        pause_before_switchover: true,
        throttle: 80,
        compress: "zstd:3".parse().unwrap(),
        when_busy: vmferry::config::compression::WhenBusy::Wait,
        workers: Some(3),
        delta_memory: 1 << 20,
        free_page_hints: false,
        verify: true,
        protocol: Some(1),
        witness: Some("/w".into()),
        record: Some(RecordRequest { directory: "/r".into(), limit: 7 }),
    }
}

fn all() -> Vec<Request> {
    let change = ChangeRequest {
        max_bandwidth: Some(None),
        downtime_limit: Some(Duration::from_millis(50)),
        max_rounds: Some(9),
        throttle: Some(0),
        post_copy: None,
    };
    vec![
        Request::Status,
        Request::Pause,
        Request::Resume,
        Request::Quit,
        Request::Balloon,
        Request::SetBalloon { target_bytes: 1 << 20 },
        Request::Estimate(EstimateRequest { time: Duration::from_millis(1500) }),
        Request::Migrate(Box::new(every_option())),
        Request::Migrate(Box::default()),
        Request::Change(change),
        Request::Change(ChangeRequest::default()),
        Request::Cancel,
        Request::SwitchOver,
        Request::Resolve { word: OperatorWord::DestinationOwns },
        Request::Resolve { word: OperatorWord::SourceResumes },
        Request::GiveUp,
    ]
}

#[test]
fn requests_round_trip() {
    let mut routes = Vec::new();
    for request in all() {
        let (method, path, body) = request.parts();
        let text = request_text(method, path, &body);
        let raw = read_request(&mut text.as_bytes(), || Ok(())).unwrap();
        assert_eq!(Request::read(&raw), Ok(request), "{text}");
        routes.push((method, path));
    }
    routes.dedup();
    assert_eq!(routes, ROUTES, "each route has a request, and each request a route");
}

/// The form that scripts use.
#[test]
fn golden_bodies() {
    for (request, golden) in [
        (
            Request::Migrate(Box::new(every_option())),
            r#"{"to":"tls:b:7001","tls":{"ca":"/t/ca.pem","certificate":"/t/host.pem","key":"/t/host.key","revocations":[],"revocations_if_present":"/t/crl.pem","clock_skew_ms":300000,"server_name":null,"destination_id":"spiffe://x"},"addresses":["192.0.2.1"],"channels":16,"downtime_limit_ms":0.3,"downtime_abort_ms":4000,"max_bandwidth":1048576,"max_rounds":3,"reconnect_timeout_ms":0,"timeout_ms":60000,"when_stuck":"switch-over","post_copy":"never","pause_before_switchover":true,"throttle":80,"compress":"zstd:3","when_busy":"wait","workers":3,"delta_memory":1048576,"free_page_hints":false,"verify":true,"protocol":1,"witness":"/w","record":{"directory":"/r","limit":7}}"#,
        ),
        (
            Request::Change(ChangeRequest {
                max_bandwidth: Some(None),
                ..ChangeRequest::default()
            }),
            r#"{"max_bandwidth":null}"#,
        ),
        (Request::Change(ChangeRequest::default()), "{}"),
        (Request::Resolve { word: OperatorWord::SourceResumes }, r#"{"word":"source-resumes"}"#),
        (Request::SetBalloon { target_bytes: 7 }, r#"{"target_bytes":7}"#),
        (Request::Estimate(EstimateRequest::default()), r#"{"time_ms":5000}"#),
    ] {
        assert_eq!(request.parts().2, golden);
    }
}

#[test]
fn migrate_request_requires_only_the_destination() {
    let read = Request::read(&raw("PUT", "/api/v1/migration", r#"{"to":"unix:/in"}"#));
    let expected = MigrateRequest { to: "unix:/in".into(), ..MigrateRequest::default() };
    assert_eq!(read, Ok(Request::Migrate(Box::new(expected))));
}

#[test]
fn read_names_unknown_requests_and_members() {
    for (method, path, text, code, names) in [
        (
            "PUT",
            "/api/v1/guest/dance",
            "",
            ErrorCode::NoSuchRequest,
            "no request `PUT /api/v1/guest/dance`",
        ),
        ("POST", "/api/v1/guest", "", ErrorCode::NoSuchRequest, "no request `POST"),
        ("PUT", "/api/v1/guest/pause", r#"{"x":1}"#, ErrorCode::BadRequest, "unknown field `x`"),
        ("PATCH", "/api/v1/migration", r#"{"x":1}"#, ErrorCode::BadRequest, "unknown field `x`"),
        (
            "PUT",
            "/api/v1/migration",
            r#"{"to":"x","freeze_disks":true}"#,
            ErrorCode::BadRequest,
            "unknown field `freeze_disks`",
        ),
        (
            "PUT",
            "/api/v1/migration",
            r#"{"to":"x","tls":{"ca":"a","certificate":"c","key":"k","pinned":"x"}}"#,
            ErrorCode::BadRequest,
            "unknown field `pinned`",
        ),
        (
            "PUT",
            "/api/v1/migration",
            r#"{"to":"x","downtime_limit_ms":-1}"#,
            ErrorCode::BadRequest,
            "negative",
        ),
        (
            "PUT",
            "/api/v1/migration/resolve",
            r#"{"word":"nobody"}"#,
            ErrorCode::BadRequest,
            "unknown variant `nobody`",
        ),
        ("PUT", "/api/v1/migration/resolve", "", ErrorCode::BadRequest, "missing field `word`"),
        ("PUT", "/api/v1/migration", "[", ErrorCode::BadRequest, "EOF"),
    ] {
        let error = Request::read(&raw(method, path, text)).unwrap_err();
        assert_eq!(error.code, code, "{method} {path} {text}");
        assert!(error.message.contains(names), "{text}: {error}");
        assert!((400..500).contains(&error.code.status()), "{error}");
    }
    let optional = raw("PUT", "/api/v1/guest/pause", r#"{"optional":{"x":1}}"#);
    assert_eq!(Request::read(&optional), Ok(Request::Pause));
}

#[test]
fn golden_errors() {
    let refused = ControlError::new(ErrorCode::WrongState, "no");
    let text = serde_json::to_string(&refused).unwrap();
    assert_eq!(text, r#"{"code":"wrong-state","message":"no"}"#);
    for (code, name) in [
        (ErrorCode::BadRequest, "bad-request"),
        (ErrorCode::NoSuchRequest, "no-such-request"),
        (ErrorCode::Connect, "connect"),
        (ErrorCode::Authentication, "authentication"),
        (ErrorCode::Protocol, "protocol"),
        (ErrorCode::Incompatible, "incompatible"),
        (ErrorCode::Busy, "busy"),
        (ErrorCode::LinkLost, "link-lost"),
        (ErrorCode::NotConverging, "not-converging"),
        (ErrorCode::Cancelled, "cancelled"),
        (ErrorCode::Corrupt, "corrupt"),
        (ErrorCode::InDoubt, "in-doubt"),
        (ErrorCode::Internal, "internal"),
    ] {
        assert_eq!(serde_json::to_string(&code).unwrap(), format!("\"{name}\""));
    }
    // A code from a newer release: the message still reaches the user.
    let newer = r#"{"code":"frozen","message":"thaw it first","since":9}"#;
    let error: ControlError = serde_json::from_str(newer).unwrap();
    assert_eq!((error.code, error.message.as_str()), (ErrorCode::Internal, "thaw it first"));
}
