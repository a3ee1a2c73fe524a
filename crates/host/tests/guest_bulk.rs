//! Large files through the link, alone in their process so that its memory can be measured.

mod machine;

use futures_util::StreamExt;
use host::guest::{Continuity, WriteSpec};
use machine::Machine;

const SIZE: usize = 100 * 1024 * 1024;
/// What the process may grow by while 100 MiB pass: some windows and buffers.
const GROWTH_MAX: usize = 24 * 1024 * 1024;

#[tokio::test]
async fn s22_a_large_file_passes_both_ways_and_is_never_held() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let path = machine.path("large");
    let before = peak();
    let spec = WriteSpec { path: path.clone().into(), mode: None, parents: false };
    let mut upload = link.file_write(spec).expect("opens");
    let mut sent = 0;
    while sent < SIZE {
        upload.write(&pattern(sent)).await.expect("write");
        sent += PIECE;
    }
    assert_eq!(upload.finish().await.expect("finish"), SIZE as u64);

    let mut download = link.file_read(&path, 0, None).await.expect("read").download;
    let mut received = 0;
    while let Some(bytes) = download.next().await {
        for byte in bytes.expect("bytes") {
            assert!(byte == at(received), "byte {received}");
            received += 1;
        }
    }
    assert_eq!(received, SIZE);
    assert_eq!(machine.system.calls(), [""; 0], "moving files changes nothing else");
    let growth = peak() - before;
    assert!(growth < GROWTH_MAX, "grew by {growth} bytes");
}

const PIECE: usize = 1024 * 1024;

fn at(position: usize) -> u8 {
    // Differs from page to page, and within one.
    (position ^ (position >> 12)).to_le_bytes()[0]
}

fn pattern(from: usize) -> Vec<u8> {
    (from..from + PIECE).map(at).collect()
}

/// The most memory that this process ever had, in bytes.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("VmHWM");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("number") * 1024
}
