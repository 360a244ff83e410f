//! Horizontal stacked bars with a legend.

use maud::{Markup, html};

use crate::chart::{Tone, swatch};

/// A bar.
pub struct Strip<'a> {
    /// The label.
    pub label: String,
    /// The parts: tone, name and size.
    pub parts: Vec<(Tone, &'a str, f64)>,
    /// An activity in parallel to a part: name, start, and size.
    pub parallel: Option<(&'a str, f64, f64)>,
}

/// Width in units of the SVG; a unit is a pixel on a wide screen.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 44.0;

/// Draws bars with a common axis that ends at `end`.
pub fn strips(
    id: &str,
    title: &str,
    strips: &[Strip<'_>],
    end: f64,
    text: impl Fn(f64) -> String,
) -> Markup {
    let scale = |number: f64| {
        let part = if end > 0.0 { number / end } else { 0.0 };
        if part.is_finite() { part.clamp(0.0, 1.0) * WIDTH } else { 0.0 }
    };
    html! {
        @for (index, strip) in strips.iter().enumerate() {
            @let id = format!("{id}-{index}");
            div.strip {
                @if !strip.label.is_empty() { p.label { (strip.label) } }
                @let height = HEIGHT + if strip.parallel.is_some() { 16.0 } else { 0.0 };
                svg.bar viewBox=(format!("0 0 {WIDTH} {height}"))
                    preserveAspectRatio="none" role="img" aria-labelledby=(format!("{id}-t")) {
                    title id=(format!("{id}-t")) {
                        (title) ": " (describe(strip, &text))
                    }
                    rect.track width=(WIDTH) height=(HEIGHT) {}
                    @for (tone, name, begin, size) in placed(&strip.parts) {
                        @if scale(size) > 0.0 {
                            rect x=(scale(begin)) width=(scale(size).max(1.5))
                                height=(HEIGHT) fill=(tone.hex()) {
                                title { (name) " " (text(size)) }
                            }
                        }
                    }
                    @if let Some((name, begin, size)) = strip.parallel {
                        rect x=(scale(begin)) y=(HEIGHT + 6.0) width=(scale(size).max(1.5))
                            height="10" fill=(Tone::Grey.hex()) {
                            title { (name) " " (text(size)) }
                        }
                    }
                }
                ul.legend {
                    @for (tone, name, size) in &strip.parts {
                        li { (swatch(*tone, false)) (name) " " b { (text(*size)) } }
                    }
                    @if let Some((name, _, size)) = strip.parallel {
                        li { (swatch(Tone::Grey, false)) (name) " " b { (text(size)) } }
                    }
                }
            }
        }
    }
}

fn placed<'a>(
    parts: &'a [(Tone, &'a str, f64)],
) -> impl Iterator<Item = (Tone, &'a str, f64, f64)> {
    parts.iter().scan(0.0, |end, (tone, name, size)| {
        let begin = *end;
        *end += size;
        Some((*tone, *name, begin, *size))
    })
}

fn describe(strip: &Strip<'_>, text: &impl Fn(f64) -> String) -> String {
    let parts = strip.parts.iter().map(|(_, name, size)| format!("{name} {}", text(*size)));
    let parallel = strip.parallel.iter().map(|(name, _, size)| format!("{name} {}", text(*size)));
    parts.chain(parallel).collect::<Vec<_>>().join(", ")
}
