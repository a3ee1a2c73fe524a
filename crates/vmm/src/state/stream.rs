//! QEMU's migration stream, read through its own description.
//!
//! ```text
//! magic be32, version be32
//! 07 be32 len, machine name                     configuration (further parts follow; skipped to the first section)
//! 01|04 be32 id, u8 len, name, be32 instance, be32 version, payload, 7e be32 id       a section
//! 02|03 be32 id, payload, 7e be32 id                                                  its continuation (memory)
//! 00                                            end
//! 06 be32 len, JSON                             description of the device sections' fields, in stream order
//! ```
//!
//! Every field's place follows from the JSON; every section's end is checked against its footer. A stream that does not fit to the last byte is refused.

use std::collections::BTreeMap;

/// A stream that was walked from end to end: where each field of each device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stream {
    fields: BTreeMap<String, Field>,
}

/// Where a field is, in bytes from the start of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Its first byte.
    pub at: usize,
    /// Its length.
    pub bytes: usize,
}

/// A stream that is not what QEMU writes.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The first bytes are not a migration stream's, or of another version.
    #[error("expected the bytes 'QEVM' and version 3 at the start")]
    Magic,
    /// No description at the end.
    #[error("no description of the devices at the end")]
    NoDescription,
    /// The description is not what it should be.
    #[error("read the description of the devices")]
    Description(#[source] serde_json::Error),
    /// A described section is missing.
    #[error("section {0} not found")]
    NoSection(String),
    /// A section does not end where its description says.
    #[error("section {section} does not end at byte {at}, where its description says")]
    Footer {
        /// The section.
        section: String,
        /// Where its footer should be.
        at: usize,
    },
    /// Neither a described device nor the end.
    #[error("something unknown after the last device, at byte {at}")]
    Trailing {
        /// Where it begins.
        at: usize,
    },
    /// Lengths or nesting beyond reason.
    #[error("section {0} is described with impossible lengths")]
    Lengths(String),
    /// A field we need is missing, twice there, or of another size.
    #[error("no field {0} of 8 bytes")]
    NoField(String),
}

/// Deepest nesting of structures. Six were seen.
const DEPTH_MAX: usize = 24;
/// Most fields of a stream. 356 were seen with one processor and few devices.
const FIELDS_MAX: usize = 200_000;

const SECTION_START: u8 = 0x01;
const SECTION_FULL: u8 = 0x04;
const SUBSECTION: u8 = 0x05;
const DESCRIPTION: u8 = 0x06;
const END: u8 = 0x00;
const FOOTER: u8 = 0x7e;

impl Stream {
    /// Walks a whole stream.
    pub fn parse(bytes: &[u8]) -> Result<Self, StreamError> {
        if !bytes.starts_with(b"QEVM\0\0\0\x03") {
            return Err(StreamError::Magic);
        }
        let (json_at, description) = description(bytes)?;
        let mut walk = Walk { bytes: &bytes[..json_at], at: 0, steps: 0, fields: BTreeMap::new() };
        let Some(first) = description.devices.first() else {
            return Err(StreamError::NoDescription);
        };
        walk.at = walk.find(first)?;
        for device in &description.devices {
            walk.section(device)?;
        }
        // What is left is the end mark and the description's own head; anything else is not ours to load.
        if bytes[walk.at..json_at - 4] != [END, DESCRIPTION] {
            return Err(StreamError::Trailing { at: walk.at });
        }
        Ok(Self { fields: walk.fields })
    }

    /// All fields by path: `device/field`, `device#instance/structure/field[index]`.
    pub fn fields(&self) -> &BTreeMap<String, Field> {
        &self.fields
    }

    /// Whether there is such a field.
    pub fn has(&self, path: &str) -> bool {
        self.fields.contains_key(path)
    }

    /// Where a field of 8 bytes is.
    pub fn field_u64(&self, path: &str) -> Result<usize, StreamError> {
        match self.fields.get(path) {
            Some(field) if field.bytes == 8 => Ok(field.at),
            _ => Err(StreamError::NoField(path.to_owned())),
        }
    }

    /// Where the fields of 8 bytes with this last name are, one per processor for instance. At least one.
    pub fn fields_u64_named(&self, name: &str) -> Result<Vec<usize>, StreamError> {
        let named = self.fields.iter().filter(|(path, _)| path.rsplit('/').next() == Some(name));
        let found: Vec<Field> = named.map(|(_, field)| *field).collect();
        if found.is_empty() || found.iter().any(|field| field.bytes != 8) {
            return Err(StreamError::NoField(name.to_owned()));
        }
        Ok(found.into_iter().map(|field| field.at).collect())
    }
}

#[derive(Debug, serde::Deserialize)]
struct Description {
    devices: Vec<Device>,
}

#[derive(Debug, serde::Deserialize)]
struct Device {
    name: String,
    instance_id: u32,
    version: u32,
    #[serde(flatten)]
    layout: Layout,
}

#[derive(Debug, serde::Deserialize)]
struct Layout {
    #[serde(default)]
    fields: Vec<Described>,
    #[serde(default)]
    subsections: Vec<Subsection>,
}

#[derive(Debug, serde::Deserialize)]
struct Described {
    name: String,
    size: usize,
    array_len: Option<usize>,
    index: Option<usize>,
    #[serde(rename = "struct")]
    structure: Option<Layout>,
}

#[derive(Debug, serde::Deserialize)]
struct Subsection {
    vmsd_name: String,
    #[serde(flatten)]
    layout: Layout,
}

/// The description is the last thing in the stream: mark, length, and exactly that much JSON.
fn description(bytes: &[u8]) -> Result<(usize, Description), StreamError> {
    let mut end = bytes.len();
    while let Some(at) = bytes[..end].iter().rposition(|&byte| byte == b'{') {
        end = at;
        let head = at.checked_sub(5).map(|start| &bytes[start..at]);
        if let Some([DESCRIPTION, a, b, c, d]) = head
            && u32::from_be_bytes([*a, *b, *c, *d]) as usize == bytes.len() - at
        {
            let description =
                serde_json::from_slice(&bytes[at..]).map_err(StreamError::Description)?;
            return Ok((at, description));
        }
    }
    Err(StreamError::NoDescription)
}

struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
    steps: usize,
    fields: BTreeMap<String, Field>,
}

impl Walk<'_> {
    /// Where the first device's section begins. What precedes it is memory, which has no description.
    fn find(&self, device: &Device) -> Result<usize, StreamError> {
        let head = head(device)?;
        let mut windows = self.bytes.windows(head.len()).enumerate().skip(5);
        let found = windows.find(|(at, window)| {
            *window == head.as_slice() && matches!(self.bytes[at - 5], SECTION_START | SECTION_FULL)
        });
        found.map(|(at, _)| at - 5).ok_or_else(|| StreamError::NoSection(device.name.clone()))
    }

    fn section(&mut self, device: &Device) -> Result<(), StreamError> {
        let missing = || StreamError::NoSection(device.name.clone());
        let mark = self.take(5).ok_or_else(missing)?;
        let (kind, id) = (self.bytes[mark], &self.bytes[mark + 1..mark + 5]);
        let head = head(device)?;
        if !matches!(kind, SECTION_START | SECTION_FULL)
            || !self.bytes[self.at..].starts_with(&head)
        {
            return Err(missing());
        }
        self.at += head.len();
        let path = match device.instance_id {
            0 => device.name.clone(),
            instance => format!("{}#{instance}", device.name),
        };
        self.layout(&device.layout, &path, 0)?;
        let footer = self.at;
        if self.bytes.get(footer) != Some(&FOOTER)
            || self.bytes.get(footer + 1..footer + 5) != Some(id)
        {
            return Err(StreamError::Footer { section: path, at: footer });
        }
        self.at += 5;
        Ok(())
    }

    fn layout(&mut self, layout: &Layout, path: &str, depth: usize) -> Result<(), StreamError> {
        let impossible = || StreamError::Lengths(path.to_owned());
        if depth > DEPTH_MAX {
            return Err(impossible());
        }
        for field in &layout.fields {
            self.field(field, path, depth)?;
        }
        for subsection in &layout.subsections {
            // 05, u8 length, name, be32 version
            let name = subsection.vmsd_name.as_bytes();
            let at = self.take(2 + name.len() + 4).ok_or_else(impossible)?;
            let head = &self.bytes[at..at + 2 + name.len()];
            if head[0] != SUBSECTION || usize::from(head[1]) != name.len() || &head[2..] != name {
                return Err(StreamError::Footer {
                    section: format!("{path}/{}", subsection.vmsd_name),
                    at,
                });
            }
            self.layout(
                &subsection.layout,
                &format!("{path}/{}", subsection.vmsd_name),
                depth + 1,
            )?;
        }
        Ok(())
    }

    fn field(&mut self, field: &Described, path: &str, depth: usize) -> Result<(), StreamError> {
        let index = |at: usize| format!("{path}/{}[{at}]", field.name);
        let count = field.array_len.unwrap_or(1);
        for element in 0..count {
            self.steps += 1;
            let impossible = || StreamError::Lengths(path.to_owned());
            if self.steps > FIELDS_MAX {
                return Err(impossible());
            }
            let name = match (field.index, field.array_len) {
                (Some(at), _) => index(at),
                (None, Some(_)) => index(element),
                (None, None) => format!("{path}/{}", field.name),
            };
            if let Some(layout) = &field.structure {
                self.layout(layout, &name, depth + 1)?;
            } else {
                let at = self.take(field.size).ok_or_else(impossible)?;
                self.fields.insert(name, Field { at, bytes: field.size });
            }
        }
        Ok(())
    }

    /// Goes on by `bytes`; where it was.
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let at = self.at;
        let end = at.checked_add(bytes).filter(|&end| end <= self.bytes.len())?;
        self.at = end;
        Some(at)
    }
}

/// A section's head after its mark and number.
fn head(device: &Device) -> Result<Vec<u8>, StreamError> {
    let length =
        u8::try_from(device.name.len()).map_err(|_| StreamError::Lengths(device.name.clone()))?;
    let mut head = vec![length];
    head.extend_from_slice(device.name.as_bytes());
    head.extend_from_slice(&device.instance_id.to_be_bytes());
    head.extend_from_slice(&device.version.to_be_bytes());
    Ok(head)
}

#[cfg(test)]
pub(super) mod samples {
    //! States of a machine with one processor, disk, no network, saved by Debian's QEMU while its guest ran.

    pub(crate) fn qemu_7() -> Vec<u8> {
        unpack("state-qemu-7.2.gz")
    }

    pub(crate) fn qemu_10() -> Vec<u8> {
        unpack("state-qemu-10.0.gz")
    }

    fn unpack(name: &str) -> Vec<u8> {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
        let output = std::process::Command::new("gzip").arg("-dc").arg(path).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::{Expect, expect};
    use proptest::prelude::*;

    #[test]
    fn every_field_of_a_real_state_is_found() {
        for (bytes, expected) in [(samples::qemu_7(), 516), (samples::qemu_10(), 516)] {
            let stream = Stream::parse(&bytes).unwrap();
            assert_eq!(stream.fields().len(), expected);
            for field in [
                "timer/cpu_clock_offset",
                "timer/cpu_ticks_offset",
                "apic/next_time",
                "cpu/env.tsc",
            ] {
                stream.field_u64(field).unwrap();
            }
            assert_eq!(stream.fields_u64_named("env.tsc").unwrap().len(), 1);
            assert!(stream.field_u64("i8254/channels[0]/mode").is_err(), "it has one byte");
            assert!(!stream.has("kvmclock/clock"));
        }
    }

    fn refused(bytes: &[u8], expected: &Expect) {
        expected.assert_eq(&Stream::parse(bytes).unwrap_err().to_string());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let good = samples::qemu_7();
        refused(&[], &expect!["expected the bytes 'QEVM' and version 3 at the start"]);
        refused(
            b"QEVM\0\0\0\x02",
            &expect!["expected the bytes 'QEVM' and version 3 at the start"],
        );
        refused(&good[..8], &expect!["no description of the devices at the end"]);
        refused(&good[..good.len() - 1], &expect!["no description of the devices at the end"]);
        refused(&[&good[..], &[0]].concat(), &expect!["no description of the devices at the end"]);

        // A byte more or less anywhere among the devices: nothing after it ends where it should.
        let timer = Stream::parse(&good).unwrap().field_u64("timer/cpu_clock_offset").unwrap();
        let mut longer = good.clone();
        longer.insert(timer, 0);
        refused(
            &longer,
            &expect!["section timer does not end at byte 33344, where its description says"],
        );
        let mut shorter = good.clone();
        shorter.remove(timer);
        refused(
            &shorter,
            &expect!["section timer does not end at byte 33344, where its description says"],
        );
        // Something between the last section and the description.
        let end = good
            .windows(6)
            .rposition(|window| window[..2] == [END, DESCRIPTION] && window[5] != 0)
            .unwrap();
        let mut between = good.clone();
        between.splice(end..end, [0; 16]);
        refused(&between, &expect!["something unknown after the last device, at byte 50107"]);
    }

    fn with_description(json: &str) -> Vec<u8> {
        let mut bytes =
            b"QEVM\0\0\0\x03\x04\0\0\0\x01\x01t\0\0\0\0\0\0\0\x01\x7e\0\0\0\x01\0\x06".to_vec();
        bytes.extend_from_slice(&u32::try_from(json.len()).unwrap().to_be_bytes());
        bytes.extend_from_slice(json.as_bytes());
        bytes
    }

    #[test]
    fn descriptions_that_ask_too_much_are_refused() {
        let device = |fields: &str| {
            with_description(&format!(
                r#"{{"devices":[{{"name":"t","instance_id":0,"version":1,"fields":[{fields}]}}]}}"#
            ))
        };
        assert!(Stream::parse(&device("")).is_ok());
        refused(
            &device(r#"{"name":"a","size":18446744073709551615}"#),
            &expect!["section t is described with impossible lengths"],
        );
        refused(
            &device(r#"{"name":"a","size":0,"array_len":4000000000}"#),
            &expect!["section t is described with impossible lengths"],
        );
        let nested = "{\"name\":\"a\",\"size\":0,\"array_len\":100000,\"struct\":{\"fields\":["
            .repeat(20)
            + &"]}}".repeat(20);
        refused(
            &device(&nested),
            &expect![
                "section t/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[0]/a[1] is described with impossible lengths"
            ],
        );
        let deep =
            "{\"name\":\"a\",\"size\":0,\"struct\":{\"fields\":[".repeat(30) + &"]}}".repeat(30);
        refused(
            &device(&deep),
            &expect![
                "section t/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a is described with impossible lengths"
            ],
        );
        refused(
            &with_description(r#"{"devices":[]}"#),
            &expect!["no description of the devices at the end"],
        );
        refused(
            &with_description(r#"{"devices":[{"name":"u","instance_id":0,"version":1}]}"#),
            &expect!["section u not found"],
        );
        refused(
            &with_description(r#"{"devices":7}"#),
            &expect!["read the description of the devices"],
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Refused or walked, and nothing found lies outside.
        #[test]
        fn any_damage_is_survived(at in 0_usize..70_000, byte: u8, cut in 0_usize..140_000) {
            let mut bytes = samples::qemu_7();
            let at = at % bytes.len();
            bytes[at] = byte;
            bytes.truncate(cut);
            if let Ok(stream) = Stream::parse(&bytes) {
                prop_assert!(stream.fields().values().all(|field| field.at + field.bytes <= bytes.len()));
            }
        }

        #[test]
        fn any_bytes_behind_the_magic_are_survived(noise in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _: Result<Stream, StreamError> = Stream::parse(&[b"QEVM\0\0\0\x03", &noise[..]].concat());
        }
    }
}
