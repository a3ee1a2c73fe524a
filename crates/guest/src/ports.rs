//! Connections to ports on the guest's loopback.

use std::net::Ipv4Addr;

use rustix::net::sockopt::set_tcp_nodelay;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use wire::{Reply, frame::PAYLOAD_MAX};

use crate::{
    channel::{Inbox, Outbox},
    failure::io_failure,
    serve::End,
};

pub(crate) async fn connect(port: u16, mut inbox: Inbox, outbox: &Outbox) -> End {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await;
    let mut stream = match stream {
        Ok(stream) => stream,
        Err(error) => {
            let doing = format!("connect to port {port}");
            outbox.fail(io_failure(&error, "port", &doing)).await;
            return End::Fin;
        }
    };
    // Small answers must not wait for each other; if it cannot be set they merely do.
    let _slower = set_tcp_nodelay(&stream, true);
    outbox.reply(&Reply::Connected).await;
    let (mut read, mut write) = stream.split();
    let to_host = async {
        let mut chunk = vec![0; PAYLOAD_MAX];
        loop {
            match read.read(&mut chunk).await? {
                0 => return std::io::Result::Ok(()),
                bytes => outbox.data(&chunk[..bytes]).await,
            }
        }
    };
    // The host must see the program's end while its own direction is still open, so the two end apart.
    let to_program = async {
        while let Some(bytes) = inbox.recv().await {
            write.write_all(&bytes).await?;
        }
        write.shutdown().await
    };
    let finished = async {
        let read = to_host.await;
        if read.is_ok() {
            outbox.fin();
        }
        read
    };
    // A program that takes no more may still have an answer on its way, so reading goes on to its own end.
    match tokio::join!(finished, to_program) {
        (Ok(()), Ok(())) => End::Sent,
        _ => End::Reset,
    }
}
