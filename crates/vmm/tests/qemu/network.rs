//! Taps, alone and with a guest. Each test runs itself again in a network namespace of its own, so that nothing of it is seen by the host.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{Bench, Guest, STEP_MAX, in_own_network};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use vmm::packet::{Verdict, Wake, classify};
use vmm::tap::{ActivityWatch, Frame, Injector, LinkSetup, Reader, Tap, set_up};
use vmm::{Machine, MachineSpec, Network};

const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 231, 7, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 231, 7, 2);
const SETUP: LinkSetup = LinkSetup {
    gateway: GATEWAY,
    host_mac: [0x02, 0, 0, 0, 0, 1],
    guest: GUEST,
    guest_mac: [0x02, 0, 0, 0, 0, 2],
    mtu: 1500,
    queue_packets: 500,
    ipv6: None,
};

#[test]
fn a_tap_is_made_set_up_found_again_and_removed() {
    in_own_network("network::a_tap_is_made_set_up_found_again_and_removed", async || {
        let since = Instant::now();
        let tap = Tap::create("vmmtest0").unwrap();
        let made = since.elapsed();
        set_up(&tap, SETUP).unwrap();
        println!("tap made in {made:?}, set up in {:?}", since.elapsed().saturating_sub(made));
        // Twice is as good as once.
        set_up(&tap, SETUP).unwrap();
        let link = ip("link");
        for expected in ["mtu 1500", "qlen 500", "02:00:00:00:00:01", ",UP"] {
            assert!(link.contains(expected), "{expected}: {link}");
        }
        let addresses = ip("address");
        assert!(
            addresses.contains("inet 10.231.7.1/32") && !addresses.contains("inet6"),
            "{addresses}"
        );
        assert!(
            ip("neighbour").contains("10.231.7.2 lladdr 02:00:00:00:00:02 PERMANENT"),
            "{}",
            ip("neighbour")
        );
        assert!(
            ip("route").contains("10.231.7.2 proto static scope link src 10.231.7.1"),
            "{}",
            ip("route")
        );

        // While somebody holds it, it cannot be had by name.
        assert!(Tap::create("vmmtest0").unwrap_err().is_busy());
        let index = tap.index();
        drop(tap);
        // It has outlived its descriptor.
        let again = Tap::open("vmmtest0").unwrap();
        assert_eq!(again.index(), index);
        again.delete().unwrap();
        assert_eq!(Tap::open("vmmtest0").unwrap_err().source.kind(), std::io::ErrorKind::NotFound);
        assert!(!Tap::delete_named("vmmtest0").unwrap());
        for wrong in ["", "..", "a/b", "a b", "a-name-of-16-byt"] {
            let error = Tap::create(wrong).unwrap_err();
            assert!(error.source.to_string().contains("1 to 15 letters"), "{wrong}: {error:?}");
        }
    });
}

/// In both tiers a packet is seen, judged, kept and given back, and connections go on.
#[test]
fn s07_s08_packets_wake_in_both_tiers_and_none_is_lost() {
    in_own_network("network::s07_s08_packets_wake_in_both_tiers_and_none_is_lost", async || {
        let bench = Bench::new();
        let tap = Tap::create("vmmtest0").unwrap();
        set_up(&tap, SETUP).unwrap();
        let activity = ActivityWatch::new(&tap).unwrap();
        let injector = Injector::new(&tap).unwrap();
        let spec = MachineSpec {
            network: Some(Network { tap: tap.fd(), mac: SETUP.guest_mac }),
            ..bench.spec()
        };
        let (mut machine, mut guest) = bench.boot(&spec).await;
        assert_eq!(guest.ask("net 10.231.7.2").await, "ok");
        let mut established = TcpStream::connect((GUEST, 7)).await.unwrap();
        echo(&mut established, b"first").await;
        assert!(activity.drain().unwrap());
        // The acknowledgement of the echo may still be on its way; nothing else is.
        assert!(!activity.drain().unwrap());

        // Stopped process: a new connection.
        machine.stop_process().await.unwrap();
        let mut reader = tap.reader().unwrap();
        let connecting = tokio::spawn(TcpStream::connect((GUEST, 7)));
        let since = Instant::now();
        let (frame, verdict) = waking(&mut reader).await;
        println!("SYN seen after {:?}", since.elapsed());
        assert!(
            matches!(verdict, Verdict::Wake(Wake::TcpSyn { port: 7, peer, .. }) if peer == GATEWAY),
            "{verdict:?}"
        );
        drop(reader);
        machine.continue_process().await.unwrap();
        injector.send(&frame).unwrap();
        let mut second = connecting.await.unwrap().unwrap();
        println!("connected after {:?}", since.elapsed());
        echo(&mut second, b"second").await;

        // No process: data on a connection, more than a packet of it.
        machine.pause().await.unwrap();
        let state = bench.path("state");
        let mark = machine.save_state(&state).await.unwrap().mark;
        let fingerprint = machine.fingerprint().clone();
        machine.quit().await.unwrap();
        let asleep = Instant::now();
        assert!(activity.drain().unwrap());
        let mut reader = tap.reader().unwrap();
        let data = vec![b'd'; 5000];
        established.write_all(&data).await.unwrap();
        let since = Instant::now();
        let (frame, verdict) = waking(&mut reader).await;
        assert!(is_data(verdict), "{verdict:?}");
        let mut held = vec![frame];
        while let Some(frame) = reader.try_read().unwrap() {
            held.push(frame);
        }
        drop(reader);
        let mut machine =
            Machine::restore(&bench.qemu, &spec, &state, &mark, &fingerprint, asleep.elapsed())
                .await
                .unwrap();
        for frame in &held {
            injector.send(frame).unwrap();
        }
        machine.cont().await.unwrap();
        let mut answer = vec![0; data.len()];
        tokio::time::timeout(STEP_MAX, established.read_exact(&mut answer)).await.unwrap().unwrap();
        println!("{} packets held, answer {:?} after they came", held.len(), since.elapsed());
        assert!(answer == data);
        echo(&mut second, b"third").await;
        assert_eq!(Guest::of(&machine).ask("ping").await, "pong");

        // A keepalive probe is seen as one, does not count, and wakes nobody.
        while activity.drain().unwrap() {}
        machine.stop_process().await.unwrap();
        let mut reader = tap.reader().unwrap();
        rustix::net::sockopt::set_tcp_keepidle(&second, Duration::from_secs(1)).unwrap();
        rustix::net::sockopt::set_socket_keepalive(&second, true).unwrap();
        let port = second.local_addr().unwrap().port();
        let probe = loop {
            match arrival(&mut reader).await.1 {
                // The acknowledgement of what the guest sent last, on either connection.
                Verdict::KeepaliveProbe(probe) if probe.peer_port == port => break probe,
                Verdict::KeepaliveProbe(_) => {}
                other => panic!("{other:?}"),
            }
        };
        assert_eq!((probe.peer, probe.port, probe.payload), (GATEWAY.into(), 7, 0));
        assert!(!activity.drain().unwrap());
        machine.kill().await.unwrap();
    });
}

/// After the daemon's death the tap is in QEMU's hands alone, and is had back from there.
#[test]
fn a_tap_is_taken_back_from_a_running_machine() {
    in_own_network("network::a_tap_is_taken_back_from_a_running_machine", async || {
        let bench = Bench::new();
        let tap = Tap::create("vmmtest0").unwrap();
        set_up(&tap, SETUP).unwrap();
        let index = tap.index();
        let mut spec = MachineSpec {
            network: Some(Network { tap: tap.fd(), mac: SETUP.guest_mac }),
            ..bench.spec()
        };
        let (mut machine, mut guest) = bench.boot(&spec).await;
        spec.network = None;
        drop(tap);
        assert!(Tap::open("vmmtest0").unwrap_err().is_busy());

        let tap = Tap::take(machine.process(), "vmmtest0").unwrap();
        assert_eq!(tap.index(), index);
        assert!(
            Tap::take(machine.process(), "vmmtest1")
                .unwrap_err()
                .to_string()
                .contains("no descriptor of tap vmmtest1")
        );
        assert_eq!(guest.ask("net 10.231.7.2").await, "ok");
        let mut stream = TcpStream::connect((GUEST, 7)).await.unwrap();
        echo(&mut stream, b"hello").await;
        // It is the queue itself: what comes for the stopped guest is read from it.
        machine.stop_process().await.unwrap();
        let mut reader = tap.reader().unwrap();
        stream.write_all(b"to a sleeper").await.unwrap();
        let verdict = waking(&mut reader).await.1;
        assert!(is_data(verdict), "{verdict:?}");
        machine.kill().await.unwrap();
    });
}

fn is_data(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Wake(Wake::TcpData { port: 7, peer, reset: false, .. }) if peer == GATEWAY)
}

/// Writing to the tap is speaking as the guest: here to a socket of the host.
#[test]
fn a_frame_written_comes_from_the_guest() {
    in_own_network("network::a_frame_written_comes_from_the_guest", async || {
        let tap = Tap::create("vmmtest0").unwrap();
        set_up(&tap, SETUP).unwrap();
        let activity = ActivityWatch::new(&tap).unwrap();
        let socket = tokio::net::UdpSocket::bind((GATEWAY, 5000)).await.unwrap();
        let reader = tap.reader().unwrap();
        reader.write(&udp_frame(*b"boo")).unwrap();
        let mut bytes = [0; 16];
        let (length, from) =
            tokio::time::timeout(STEP_MAX, socket.recv_from(&mut bytes)).await.unwrap().unwrap();
        assert_eq!((&bytes[..length], from), (&b"boo"[..], SocketAddr::from((GUEST, 4000))));
        assert!(activity.drain().unwrap());
        assert!(!activity.drain().unwrap());
    });
}

async fn arrival(reader: &mut Reader) -> (Frame, Verdict) {
    let next = async {
        loop {
            reader.readable().await.unwrap();
            if let Some(frame) = reader.try_read().unwrap() {
                break frame;
            }
        }
    };
    let frame = tokio::time::timeout(STEP_MAX, next).await.expect("a frame on the tap");
    let verdict = classify(frame.ethernet());
    (frame, verdict)
}

/// The next frame but for acknowledgements of what was sent before the guest stood.
async fn waking(reader: &mut Reader) -> (Frame, Verdict) {
    loop {
        match arrival(reader).await {
            (_, Verdict::KeepaliveProbe(_)) => {}
            other => break other,
        }
    }
}

async fn echo(stream: &mut TcpStream, words: &[u8]) {
    stream.write_all(words).await.unwrap();
    let mut back = vec![0; words.len()];
    tokio::time::timeout(STEP_MAX, stream.read_exact(&mut back)).await.expect("an echo").unwrap();
    assert_eq!(back, words);
}

fn ip(what: &str) -> String {
    let output = Command::new("ip").args(["-o", what, "show", "dev", "vmmtest0"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// From the guest's port 4000 to the gateway's port 5000, without a UDP checksum.
fn udp_frame(words: [u8; 3]) -> Vec<u8> {
    let mut ip = vec![0x45, 0, 0, 31, 0, 0, 0, 0, 64, 17, 0, 0];
    ip.extend_from_slice(&GUEST.octets());
    ip.extend_from_slice(&GATEWAY.octets());
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ip[10..12].copy_from_slice(&(!folded).to_be_bytes()[2..]);
    let head = [&SETUP.host_mac[..], &SETUP.guest_mac, &[8, 0]].concat();
    [&head[..], &ip, &[0x0f, 0xa0, 0x13, 0x88, 0, 11, 0, 0], &words].concat()
}
