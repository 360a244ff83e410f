//! A real browser, fetched by `scripts/setup-browser`: headless Chromium, which lays a page out and
//! measures, draws and prints it.
//!
//! The page is shown in a frame in which no script runs; the lab's own page around it measures it.
//! As root the browser runs in its own network namespace, so it can't fetch anything; otherwise it
//! can't resolve any name.

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Command, Output};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use vmferry_kit::packages;

/// The measurements of the lab's page.
#[derive(Debug, Deserialize)]
pub struct Measured {
    /// The page's title.
    pub title: String,
    /// Its first heading.
    pub headline: String,
    /// The visible text.
    pub text: String,
    /// The text for assistive technology and machines.
    pub facts: String,
    /// The window's width in pixels.
    pub width: f64,
    /// The page's width.
    pub scroll_width: f64,
    /// The page's height.
    pub height: f64,
    /// Elements that reach beyond the window and do not scroll.
    pub too_wide: Vec<String>,
    /// Plots.
    pub plots: Vec<Plot>,
    /// Tiles with numbers.
    pub tiles: Vec<Area>,
    /// Widths of the parts of horizontal bars.
    pub bars: Vec<f64>,
    /// Elements that could execute or fetch something.
    pub scripts: u64,
    /// Whether a script of the page has set `harmed`.
    pub harmed: bool,
    /// The page's requests to the network or the disk.
    pub fetched: Vec<String>,
    /// Text color.
    pub ink: String,
    /// Background color.
    pub paper: String,
}

/// A plot.
#[derive(Debug, Deserialize)]
pub struct Plot {
    /// Its title.
    pub title: String,
    /// Width in pixels.
    pub width: f64,
    /// Height in pixels.
    pub height: f64,
    /// Bars, lines and points.
    pub marks: u64,
    /// Text elements.
    pub texts: u64,
    /// Text elements that are not completely within the plot.
    pub texts_outside: u64,
    /// Pairs of text elements that overlap.
    pub texts_overlapping: u64,
    /// Size of the smallest letters in screen pixels.
    pub letters_px: f64,
}

/// An element's position in pixels.
#[derive(Debug, Deserialize)]
pub struct Area {
    /// Its left edge.
    pub left: f64,
    /// Its upper edge.
    pub top: f64,
    /// Its right edge.
    pub right: f64,
    /// Its lower edge.
    pub bottom: f64,
}

/// The color scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// A light scheme, as on paper.
    Light,
    /// A dark screen.
    Dark,
}

/// Lays a page out in a window of this width and measures it.
pub fn measure(page: &str, width: u32, scheme: Scheme) -> Measured {
    let directory = tempfile::tempdir().unwrap();
    let scheme = match scheme {
        Scheme::Light => "light",
        Scheme::Dark => "dark",
    };
    let harness = include_str!("harness.html");
    let harness = harness.replace("WIDTH", &width.to_string()).replace("SCHEME", scheme);
    std::fs::write(directory.path().join("harness.html"), harness).unwrap();
    std::fs::write(directory.path().join("page.html"), page).unwrap();
    let url = url(&directory.path().join("harness.html"));
    let size = format!("--window-size={},1000", width + 40);
    let output = browse(&["--allow-file-access-from-files", &size, "--dump-dom", &url]);
    let dom = String::from_utf8(output.stdout).unwrap();
    let encoded = dom.split("measured:").nth(1).and_then(|rest| rest.split(":end").next());
    let told = String::from_utf8_lossy(&output.stderr);
    let encoded = encoded.unwrap_or_else(|| panic!("nothing was measured: {told}\n{dom}"));
    serde_json::from_slice(&STANDARD.decode(encoded).unwrap()).unwrap()
}

/// Draws the upper part of a page into a PNG file.
pub fn draw(page: &Path, (width, height): (u32, u32), scheme: Scheme, to: &Path) {
    let size = format!("--window-size={width},{height}");
    let file = format!("--screenshot={}", to.display());
    let scheme = match scheme {
        Scheme::Light => "--blink-settings=preferredColorScheme=1",
        Scheme::Dark => "--blink-settings=preferredColorScheme=0",
    };
    browse(&["--hide-scrollbars", scheme, &size, &file, &url(page)]);
}

/// Prints a page, and returns the PDF file's bytes.
pub fn print(page: &str) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("page.html"), directory.path().join("page.pdf"));
    std::fs::write(&from, page).unwrap();
    browse(&["--no-pdf-header-footer", &format!("--print-to-pdf={}", to.display()), &url(&from)]);
    std::fs::read(to).unwrap()
}

fn url(path: &Path) -> String {
    format!("file://{}", path.canonicalize().unwrap().display())
}

/// Runs the browser to its end.
fn browse(arguments: &[&str]) -> Output {
    let root = packages("browser").join("chromium/usr/lib");
    let libraries = root.join("x86_64-linux-gnu");
    // PulseAudio's private library is in a directory of its own, and Chromium links to it.
    let path = format!("{0}:{0}/pulseaudio", libraries.display());
    let profile = tempfile::tempdir().unwrap();
    let browser = root.join("chromium/chromium-headless-shell");
    let is_root = rustix::process::geteuid().is_root();
    // Chromium's own sandbox does not work for root. The pages are our own, and there is no
    // network.
    let mut command = if is_root {
        let mut command = Command::new("unshare");
        command.arg("--net").arg(&browser).arg("--no-sandbox");
        command
    } else {
        Command::new(&browser)
    };
    let output = command
        .args(["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
        .args(["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .env("LD_LIBRARY_PATH", path)
        .env("FONTCONFIG_FILE", packages("browser").join("fonts.conf"))
        .env("HOME", profile.path())
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the browser failed: {}: {told}", output.status);
    output
}
