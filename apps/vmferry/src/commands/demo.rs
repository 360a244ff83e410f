//! `vmferry demo`: a complete migration on one machine, between two processes.

mod children;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmferry_control::{Request, TlsFiles, call};
use vmferry_microvm::report::Report;
use vmferry_transport::pki;

use self::children::Child;
use super::migration::{migrate, migrate_request, saved_run};
use crate::args::{DemoOptions, Transport};
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::JsonEvents;
use crate::tables::{recorded, rounds};

const NAME: &str = "demo";

/// How long the guest may take to populate its memory, and to make progress at the destination.
const GUEST_TIMEOUT: Duration = Duration::from_secs(120);

/// How long the guest may take to check all of its memory at the destination.
const CHECK_TIMEOUT: Duration = Duration::from_secs(30);

/// How often the guest's report is polled. The guest writes it to its memory without a
/// notification.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Starts two processes, migrates a guest from one to the other, and checks it there.
pub fn run(options: &DemoOptions, output: &Output) -> Result<(), Failure> {
    let directory = tempfile::Builder::new().prefix("vmferry-demo-").tempdir()?;
    let (source_dir, destination_dir) = (directory.path().join("a"), directory.path().join("b"));
    let link = Link::make(options.transport, directory.path())?;

    let mut receive = vec!["receive", "--once", "--listen", &link.listen];
    receive.extend(link.receive_flags.iter().map(String::as_str));
    let memory_kind = options.machine.memory_kind.to_string();
    receive.extend(["--memory-kind", &memory_kind]);
    let mut destination = Child::start(&receive, &destination_dir)?;
    let listening = destination.event("listening")?;
    let to = listening["address"].as_str().unwrap_or_default().to_owned();

    let workload = workload(options);
    let mut source = Child::start(&run_arguments(options, &workload), &source_dir)?;
    let running = source.event("serving")?;
    let guest = running["guest"].as_str().unwrap_or_default().to_owned();
    output.note(format!(
        "guest: {guest} ({}), {} vCPUs, {} MiB, workload `{workload}`",
        running["choice"].as_str().unwrap_or_default(),
        running["vcpus"],
        options.machine.memory >> 20
    ));
    let source_socket = source_dir.join(format!("{NAME}.sock"));
    wait_for(&source_socket, "populate its memory", |report| report.populated)?;

    output.note(format!("migrating over {to}"));
    let request = migrate_request(to, link.tls.clone(), &options.migration, !options.no_verify);
    let saved = saved_run(&options.migration)?;
    let stats = match migrate(&source_socket, request, output, JsonEvents::None, saved) {
        Ok(stats) => stats,
        Err(failure) => {
            let before = report(&source_socket)?;
            wait_for(&source_socket, "go on", |now| goes_on(&before, now))?;
            output.note("the guest runs at the source, undamaged");
            return Err(failure);
        }
    };
    let received = destination.event("received")?;
    let source_rss = source.event("ended")?["peak_rss_bytes"].clone();
    source.wait()?;

    let destination_socket = destination_dir.join(format!("{NAME}.sock"));
    destination.event("serving")?;
    let (after, checked_all) = check_all(&destination_socket)?;
    call(&destination_socket, &Request::Quit, &mut |_| {})?;
    destination.wait()?;

    let whole =
        stats["digest_match"] == true && (options.no_verify || stats["verify_match"] == true);
    let ok = whole && after.corruptions == 0;
    let mut result = result(&stats, &received, &guest, options, &source_rss);
    result["ok"] = ok.into();
    result["guest_corruptions"] = after.corruptions.into();
    result["guest_rounds"] = after.rounds.into();
    result["guest_checked_all"] = checked_all.into();
    output.result(&result, || verdict(&result, &stats, &after));
    if ok { Ok(()) } else { Err(Failure::new(Code::Corrupt, "the guest arrived damaged")) }
}

/// The connection between the two processes.
struct Link {
    listen: String,
    receive_flags: Vec<String>,
    tls: Option<TlsFiles>,
}

impl Link {
    fn make(transport: Transport, directory: &Path) -> Result<Self, Failure> {
        let plain = |listen: String, flags: &[&str]| Self {
            listen,
            receive_flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            tls: None,
        };
        Ok(match transport {
            Transport::Unix => plain(format!("unix:{}", directory.join("in.sock").display()), &[]),
            Transport::Tcp => plain("tcp:127.0.0.1:0".into(), &["--plain"]),
            Transport::Tls => {
                let authority = directory.join("ca");
                pki::init(&authority, "vmferry demo", pki::Validity::days(1))?;
                let [a, b] = ["tls-a", "tls-b"].map(|name| directory.join(name));
                for (name, out) in [("host-a", &a), ("host-b", &b)] {
                    let mut request = pki::IssueRequest::new(name, pki::Validity::days(1));
                    request.addresses.push("127.0.0.1".into());
                    pki::issue(&authority, out, &request)?;
                }
                Self {
                    listen: "tls:127.0.0.1:0".into(),
                    receive_flags: vec!["--tls".into(), b.display().to_string()],
                    tls: Some(TlsFiles::in_directory(&a)),
                }
            }
        })
    }
}

/// The guest's workload: by default it fills a quarter of its memory and rewrites another part.
fn workload(options: &DemoOptions) -> String {
    if let Some(workload) = &options.workload {
        return workload.clone();
    }
    let usable = (options.machine.memory >> 20).saturating_sub(16);
    let hot = (options.hot >> 20).min(usable);
    let fill = (options.machine.memory >> 22).min(usable - hot);
    let mut words = Vec::new();
    if fill > 0 {
        words.push(format!("fill={fill},incompressible"));
    }
    if hot > 0 {
        words.push(format!("hot={hot},random"));
    }
    words.push("ticks".into());
    words.join(" ")
}

fn run_arguments(options: &DemoOptions, workload: &str) -> Vec<String> {
    let machine = &options.machine;
    [
        ("--guest", machine.guest.to_string()),
        ("--memory", machine.memory.to_string()),
        ("--memory-kind", machine.memory_kind.to_string()),
        ("--vcpus", machine.vcpus.to_string()),
        ("--dirty-log", machine.dirty_log.to_string()),
        ("--device-log", machine.device_log.to_string()),
        ("--workload", workload.to_owned()),
    ]
    .into_iter()
    .flat_map(|(flag, value)| [flag.to_owned(), value])
    .chain(machine.balloon.then(|| "--balloon".to_owned()))
    .fold(vec!["run".to_owned(), NAME.to_owned()], |mut all, word| {
        all.push(word);
        all
    })
}

fn report(socket: &Path) -> Result<Report, Failure> {
    let mut status = call(socket, &Request::Status, &mut |_| {})?;
    if let Some(crash) = status["crash"].as_str() {
        return Err(Failure::new(Code::Corrupt, format!("the guest has crashed: {crash}")));
    }
    serde_json::from_value(status["report"].take())
        .map_err(|error| Failure::of(Code::Internal, error))
}

/// Whether the guest's workload makes progress and its timer ticks.
fn goes_on(before: &Report, now: &Report) -> bool {
    now.ticks >= before.ticks + 20
        && (now.work_pages + now.churn_pages == 0 || now.pages_checked > before.pages_checked)
}

/// Waits for the guest to check all of its memory again, for at most [`CHECK_TIMEOUT`], and returns
/// whether it has: a workload with a low rate would take hours.
fn check_all(socket: &Path) -> Result<(Report, bool), Failure> {
    let before = report(socket)?;
    let deadline = Instant::now() + CHECK_TIMEOUT;
    wait_for(socket, "go on at the destination", |now| goes_on(&before, now))?;
    loop {
        let now = report(socket)?;
        let all = now.has_checked_all_since(&before);
        if all || now.corruptions > 0 || Instant::now() > deadline {
            return Ok((now, all));
        }
        // The guest notifies nobody of its report.
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Polls the guest's report until it satisfies `wanted`.
fn wait_for(socket: &Path, what: &str, wanted: impl Fn(&Report) -> bool) -> Result<(), Failure> {
    let deadline = Instant::now() + GUEST_TIMEOUT;
    while !wanted(&report(socket)?) {
        if Instant::now() > deadline {
            let text = format!("the guest did not {what} within {} s", GUEST_TIMEOUT.as_secs());
            return Err(Failure::new(Code::Corrupt, text));
        }
        // The guest notifies nobody of its report.
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

fn result(
    stats: &Value,
    received: &Value,
    guest: &str,
    options: &DemoOptions,
    source_rss: &Value,
) -> Value {
    json!({
        "guest": guest,
        "transport": match options.transport {
            Transport::Tls => "tls",
            Transport::Tcp => "tcp",
            Transport::Unix => "unix",
        },
        "dirty_log": stats["dirty_log"],
        "channels": stats["channels"],
        "rounds": stats["rounds"],
        "total_ms": stats["total_ms"],
        "downtime_ms": stats["downtime_ms"],
        "predicted_downtime_ms": stats["predicted_downtime_ms"],
        "downtime": stats["downtime"],
        "sent_bytes": stats["sent_bytes"],
        "state_bytes": stats["state_bytes"],
        "memory_bytes": stats["memory_bytes"],
        "digest_match": stats["digest_match"],
        "verify_match": stats["verify_match"],
        "verify_ms": stats["verify_ms"],
        "source_cpu_s": stats["engine_cpu_s"],
        "destination_cpu_s": received["stats"]["engine_cpu_s"],
        "source_peak_rss_bytes": source_rss,
        "destination_peak_rss_bytes": received["peak_rss_bytes"],
    })
}

fn verdict(result: &Value, stats: &Value, after: &Report) -> String {
    let number = |name: &str| result[name].as_f64().unwrap_or_default();
    let mut text = rounds(&recorded(stats).rounds);
    text.push_str(&format!(
        "total {:.0} ms, downtime {:.1} ms (predicted {:.1}), {:.1} MB sent, CPU {:.2} s at the \
         source and {:.2} s at the destination\n",
        number("total_ms"),
        number("downtime_ms"),
        number("predicted_downtime_ms"),
        number("sent_bytes") / 1e6,
        number("source_cpu_s"),
        number("destination_cpu_s"),
    ));
    text.push_str(if result["digest_match"] == true {
        "digests of sent and placed pages: equal\n"
    } else {
        "digests of sent and placed pages: DIFFERENT\n"
    });
    match result["verify_match"].as_bool() {
        Some(true) => text.push_str(&format!(
            "hashes of all guest memory on both sides: equal ({:.0} ms, not counted as downtime)\n",
            number("verify_ms")
        )),
        Some(false) => text.push_str("hashes of all guest memory on both sides: DIFFERENT\n"),
        None => {}
    }
    text.push_str(&format!(
        "guest self-check at the destination: {}, {} corrupt\n",
        if result["guest_checked_all"] == true {
            "all pages checked"
        } else {
            "not all pages checked yet, because the workload is slow"
        },
        after.corruptions,
    ));
    text.push_str(if result["ok"] == true {
        "OK: the guest has moved undamaged"
    } else {
        "FAILED: see above"
    });
    text
}
