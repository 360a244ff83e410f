//! Builds the test guest from `guest/` twice: as the bare-metal ELF that the KVM backend boots
//! (embedded with `include_bytes!(concat!(env!("OUT_DIR"), "/guest.elf"))`), and its workload as a
//! host library, `vmferry_workload`, that the process guest runs in threads.
//!
//! Needs only `gcc` (or the compiler in `CC`) and binutils, and no network.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Flags for the bare-metal guest. No red zone and no vector registers, because interrupts use the
/// current stack and save nothing. No unwind tables and no stack protector, because there is no
/// runtime. No conversion of loops to memset, so that every store is the one in the source.
const GUEST_FLAGS: &[&str] = &[
    "-std=gnu11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-ffreestanding",
    "-nostdlib",
    "-mgeneral-regs-only",
    "-mno-red-zone",
    "-fno-pic",
    "-fno-pie",
    "-mcmodel=small",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-fno-asynchronous-unwind-tables",
    "-fno-tree-loop-distribute-patterns",
];

/// Flags for linking through the compiler driver.
const LINK_FLAGS: &[&str] = &[
    "-nostdlib",
    "-static",
    "-no-pie",
    "-Wl,-z,noexecstack",
    "-Wl,-z,max-page-size=4096",
    "-Wl,--build-id=none",
];

/// Flags for the process guest, which is an ordinary library. Rust links position-independent
/// executables.
const HOST_FLAGS: &[&str] = &["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC"];

/// Sources that both guests use.
const WORKLOAD: &[&str] = &["workload.c", "command_line.c", "rate.c", "heap.c", "churn.c"];
/// Sources of the bare-metal guest alone.
const MACHINE: &[&str] = &[
    "start.S",
    "kernel.c",
    "pvh.c",
    "paravirt.c",
    "network.c",
    "serial_report.c",
    "virtqueue.c",
    "balloon.c",
    "balloon_hints.c",
    "balloon_pages.c",
    "balloon_lies.c",
    "balloon_breaks.c",
];

fn main() {
    if let Err(text) = build() {
        // Not a panic, because a backtrace would hide the message.
        eprintln!("error: {text}");
        std::process::exit(1);
    }
}

fn build() -> Result<(), String> {
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR")?).join("guest");
    let out = PathBuf::from(variable("OUT_DIR")?);
    let compiler = env::var("CC").unwrap_or_else(|_| "gcc".into());

    println!("cargo:rerun-if-env-changed=CC");
    println!("cargo:rerun-if-env-changed=AR");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={}", root.display());
    if variable("CARGO_CFG_TARGET_ARCH")? != "x86_64" {
        return Err("vmferry-microvm and its guest are for x86_64 only".into());
    }

    let mut objects = Vec::new();
    for source in MACHINE.iter().chain(WORKLOAD) {
        let object = out.join(format!("guest-{source}.o"));
        compile(&compiler, GUEST_FLAGS, &root, source, &object)?;
        objects.push(object);
    }
    let mut link = program(&compiler);
    link.args(LINK_FLAGS).arg("-T").arg(root.join("link.ld")).arg("-o").arg(out.join("guest.elf"));
    run(link.args(&objects))?;

    let mut objects = Vec::new();
    for source in WORKLOAD {
        let object = out.join(format!("host-{source}.o"));
        compile(&compiler, HOST_FLAGS, &root, source, &object)?;
        objects.push(object);
    }
    let archive = out.join("libvmferry_workload.a");
    // `ar` only adds to an archive, so the archive of an earlier build is removed first.
    match std::fs::remove_file(&archive) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(format!("cannot remove {}: {error}", archive.display()));
        }
        _ => {}
    }
    let archiver = env::var("AR").unwrap_or_else(|_| "ar".into());
    run(program(&archiver).arg("crs").arg(&archive).args(&objects))?;
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static=vmferry_workload");
    Ok(())
}

fn compile(
    compiler: &str,
    flags: &[&str],
    root: &Path,
    source: &str,
    object: &Path,
) -> Result<(), String> {
    let mut command = program(compiler);
    command.args(flags).arg("-I").arg(root).arg("-c").arg(root.join(source)).arg("-o").arg(object);
    run(&mut command)
}

/// `CC` and `AR` may have arguments, as in `ccache gcc`.
fn program(words: &str) -> Command {
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    command
}

fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| {
        format!(
            "cannot run `{program}`: {error}. The test guest is C and assembly: \
             install gcc and binutils (Debian, Ubuntu: `apt-get install gcc`; Fedora: \
             `dnf install gcc`), or set CC (and AR)"
        )
    })?;
    let messages = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!(
            "`{program}` failed ({}) building the test guest:\n{messages}",
            output.status
        ));
    }
    for line in messages.lines().filter(|line| line.contains("warning:")) {
        println!("cargo:warning={line}");
    }
    Ok(())
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("{name}: {error}; run this through cargo"))
}
