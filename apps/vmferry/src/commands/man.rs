//! `vmferry man`: manual pages, generated from the same text as `--help`.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use clap::Command;
use clap_mangen::Man;
use roff::{Roff, roman};
use serde_json::json;

use crate::args::{ManOptions, public_command};
use crate::exit::Failure;
use crate::output::Output;

/// Prints vmferry.1, or writes all pages.
pub fn run(options: &ManOptions, output: &Output) -> Result<(), Failure> {
    let pages = pages()?;
    let Some(directory) = &options.dir else {
        let (_, page) = &pages[0];
        return Ok(io::stdout().write_all(page.as_bytes())?);
    };
    write(directory, &pages)?;
    let names: Vec<_> = pages.iter().map(|(name, _)| name).collect();
    output.result(&json!({ "ok": true, "directory": directory, "pages": names }), || {
        format!("wrote {} pages to {}", pages.len(), directory.display())
    });
    Ok(())
}

fn write(directory: &Path, pages: &[(String, String)]) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    for (name, page) in pages {
        let path = directory.join(name);
        std::fs::write(&path, page).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// File name and content of all pages, vmferry.1 first.
fn pages() -> io::Result<Vec<(String, String)>> {
    // `help` needs no page: the other pages have its text.
    let mut whole = public_command().disable_help_subcommand(true);
    // Gives each command its full name and the global options.
    whole.build();
    let mut pages = Vec::new();
    add(&whole, None, &mut pages)?;
    Ok(pages)
}

fn add(
    command: &Command,
    above: Option<&str>,
    pages: &mut Vec<(String, String)>,
) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    pages.push((format!("{name}.1"), page(command, &name, above)?));
    command.get_subcommands().try_for_each(|below| add(below, Some(&name), pages))
}

fn page(command: &Command, name: &str, above: Option<&str>) -> io::Result<String> {
    let mut text = Vec::new();
    let source = concat!("vmferry ", env!("CARGO_PKG_VERSION"));
    // No date, so that builds are reproducible. An empty date would be dropped, which shifts the
    // fields after it.
    let man = Man::new(command.clone()).date(" ").source(source).manual("vmferry");
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
    }
    let mut roff = Roff::new();
    if let Some(after) = command.get_after_help() {
        after_help(&mut roff, &after.to_string());
    }
    see_also(&mut roff, command, name, above);
    roff.to_writer(&mut text)?;
    Ok(ascii(&String::from_utf8_lossy(&text)))
}

/// The text after the options in `--help`: examples line by line, the rest as paragraphs.
fn after_help(roff: &mut Roff, text: &str) {
    let mut notes = false;
    for paragraph in text.split("\n\n") {
        if let Some(examples) = paragraph.strip_prefix("Examples:\n") {
            roff.control("SH", ["EXAMPLES"]).control("nf", []);
            for line in examples.lines() {
                roff.text([roman(line.strip_prefix("  ").unwrap_or(line))]);
            }
            roff.control("fi", []);
            notes = false;
            continue;
        }
        let (heading, paragraph) = match paragraph.strip_prefix("Exit status: ") {
            Some(codes) => (Some("EXIT STATUS"), codes),
            None if !notes => (Some("NOTES"), paragraph),
            None => (None, paragraph),
        };
        match heading {
            Some(heading) => roff.control("SH", [heading]),
            None => roff.control("PP", []),
        };
        roff.text([roman(paragraph)]);
        notes = heading != Some("EXIT STATUS");
    }
}

/// References to the parent command's page and the subcommands' pages.
fn see_also(roff: &mut Roff, command: &Command, name: &str, above: Option<&str>) {
    let below = command.get_subcommands().map(|below| format!("{name}-{}", below.get_name()));
    let pages: Vec<_> = above
        .map(str::to_owned)
        .into_iter()
        .chain(below)
        .map(|page| format!("{page}(1)"))
        .collect();
    roff.control("SH", ["SEE ALSO"]);
    roff.text([roman(pages.join(", "))]);
}

/// The page in ASCII with roff escapes, so that it does not depend on an encoding.
fn ascii(text: &str) -> String {
    text.chars().fold(String::new(), |mut page, c| {
        if c.is_ascii() {
            page.push(c)
        } else {
            page += &format!("\\[u{:04X}]", c as u32)
        }
        page
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Arguments;

    /// The pages of a command and of its subcommands.
    fn expected(command: &Command, name: &str) -> Vec<String> {
        let below = command.get_subcommands().filter(|below| !below.is_hide_set());
        let below = below.flat_map(|it| expected(it, &format!("{name}-{}", it.get_name())));
        std::iter::once(format!("{name}.1")).chain(below).collect()
    }

    #[test]
    fn every_public_command_has_a_page() {
        let pages = pages().unwrap();
        let names: Vec<_> = pages.iter().map(|(name, _)| name.clone()).collect();
        assert_eq!(names, expected(&Arguments::command(), "vmferry"));
        assert!(names.contains(&"vmferry-pki-revoke.1".to_owned()));
        for (name, page) in &pages {
            assert!(page.is_ascii(), "{name}");
            assert!(!page.contains("start\\-qemu") && !page.contains("vmferry\\-guard"), "{name}");
        }
    }

    /// The page has all words of the text after the options.
    #[test]
    fn page_has_all_of_the_help() {
        let pages = pages().unwrap();
        for command in public_command().get_subcommands() {
            let Some(after) = command.get_after_help() else { continue };
            let name = format!("vmferry-{}.1", command.get_name());
            let (_, page) = pages.iter().find(|(page, _)| *page == name).unwrap();
            // The page defines a string for the apostrophe, because formatters differ in it.
            let plain = page.replace(r"\*(Aq", "'").replace('\\', "");
            let after = after.to_string();
            assert_eq!(after.contains("Exit status:"), plain.contains("EXIT STATUS"), "{name}");
            // These words are headings of the page.
            let after = after.replace("Exit status:", "").replace("Examples:", "");
            for word in after.split_whitespace() {
                assert!(plain.contains(&ascii(word).replace('\\', "")), "{name}: {word}");
            }
        }
    }
}
