//! A way to the daemon on which answers to chosen requests are lost.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

use crate::lab::LISTEN;

/// What happens to a request that is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Nothing: it is passed on, and so is its answer.
    None,
    /// The connection is closed, and the daemon never hears of it.
    Request,
    /// The daemon answers, and the connection is closed instead of passing that on.
    Answer,
    /// The daemon answers, and the client waits in vain.
    Silence,
}

/// The way; it goes on until the test's end.
#[derive(Debug)]
pub struct Lossy {
    address: SocketAddr,
    loss: Arc<Mutex<Loss>>,
}

impl Lossy {
    /// Opens it. `chosen`: stands in the requests that are meant.
    #[track_caller]
    pub fn open(chosen: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listens");
        let address = listener.local_addr().expect("an address");
        let loss = Arc::new(Mutex::new(Loss::None));
        let ours = Arc::clone(&loss);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let loss = Arc::clone(&ours);
                // A connection that breaks is what this is for.
                std::thread::spawn(move || drop(pass(&stream, chosen, &loss)));
            }
        });
        Self { address, loss }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What happens from now on.
    pub fn lose(&self, loss: Loss) {
        *self.loss.lock().unwrap_or_else(PoisonError::into_inner) = loss;
    }
}

fn pass(client: &TcpStream, chosen: &str, loss: &Mutex<Loss>) -> io::Result<()> {
    let request = first_request(client)?;
    let mut loss = *loss.lock().unwrap_or_else(PoisonError::into_inner);
    if !String::from_utf8_lossy(&request).contains(chosen) {
        loss = Loss::None;
    }
    if loss == Loss::Request {
        return client.shutdown(Shutdown::Both);
    }
    let mut daemon = TcpStream::connect(LISTEN)?;
    daemon.write_all(&request)?;
    if loss == Loss::None {
        let (mut from, mut to) = (client.try_clone()?, daemon.try_clone()?);
        std::thread::spawn(move || {
            let copied = io::copy(&mut from, &mut to);
            // Gone already, if the other side closed first.
            let _ = to.shutdown(Shutdown::Write);
            copied
        });
        io::copy(&mut daemon, &mut &*client)?;
        return client.shutdown(Shutdown::Both);
    }
    // All of the answer: its last event has the result.
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    while !String::from_utf8_lossy(&answer).contains("\"result\"") {
        match daemon.read(&mut piece)? {
            0 => break,
            read => answer.extend_from_slice(&piece[..read]),
        }
    }
    if loss == Loss::Silence {
        // Until the client goes away.
        let mut client = client;
        while client.read(&mut piece)? > 0 {}
    }
    client.shutdown(Shutdown::Both)
}

/// The first request: its head, and its body if that has a length.
fn first_request(mut client: &TcpStream) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.to_ascii_lowercase();
            let length = length
                .split("content-length: ")
                .nth(1)
                .and_then(|rest| rest.split("\r\n").next()?.trim().parse::<usize>().ok());
            if body.len() >= length.unwrap_or(0) {
                return Ok(bytes);
            }
        }
        match client.read(&mut piece)? {
            0 => return Ok(bytes),
            read => bytes.extend_from_slice(&piece[..read]),
        }
    }
}
