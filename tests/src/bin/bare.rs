//! A server in a guest with nothing around it: what a command, a sync and a sign of life cost by hand.
//!
//! Over TCP on [`PORT`] each byte is an order, answered by the same byte when it is done: `t` runs `/bin/true`, `s` writes
//! everything to the disk. Over UDP on the same port a datagram with a number asks for that many ticks, a millisecond
//! apart, by which the host sees from when to when the guest stands still. It waits for nothing but orders.
#![forbid(unsafe_code)]

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::Duration;

/// Where it listens, for both protocols.
const PORT: u16 = 7001;

/// Between two ticks.
const TICK: Duration = Duration::from_millis(1);

fn main() -> io::Result<()> {
    let everywhere = (Ipv4Addr::UNSPECIFIED, PORT);
    let ticks = UdpSocket::bind(everywhere)?;
    thread::spawn(move || report(tick(&ticks)));
    let listener = TcpListener::bind(everywhere)?;
    for stream in listener.incoming() {
        let stream = stream?;
        thread::spawn(move || report(serve(stream)));
    }
    Ok(())
}

/// Carries out orders until the other side closes.
fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut order = [0];
    while stream.read(&mut order)? == 1 {
        match order[0] {
            b't' => {
                let status = Command::new("/bin/true").status()?;
                if !status.success() {
                    return Err(io::Error::other(format!("/bin/true: {status}")));
                }
            }
            b's' => rustix::fs::sync(),
            other => return Err(io::Error::other(format!("no such order: {other}"))),
        }
        stream.write_all(&order)?;
    }
    Ok(())
}

/// Sends as many ticks as are asked for to whoever asks.
fn tick(socket: &UdpSocket) -> io::Result<()> {
    loop {
        let mut count = [0; 2];
        let (length, asker) = socket.recv_from(&mut count)?;
        if length != count.len() {
            continue;
        }
        for number in 0..u16::from_le_bytes(count) {
            // One that cannot be sent is as good as one that is lost.
            let _ = socket.send_to(&number.to_le_bytes(), asker);
            #[expect(
                clippy::disallowed_methods,
                reason = "a tick is a time, there is no state to wait for"
            )]
            thread::sleep(TICK);
        }
    }
}

fn report(ended: io::Result<()>) {
    if let Err(error) = ended {
        eprintln!("bare: {error}");
    }
}
