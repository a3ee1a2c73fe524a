//! nginx in front of a port of a guest, with what makes it fast: connections to the guest that stay open, no log, no file.

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

use super::Target;
use crate::{net, proc, until};

/// Its worker processes: as many as the daemon has threads on a machine of two processors.
pub(super) const WORKERS: usize = 2;
/// Idle connections to the guest that each worker keeps.
pub(super) const KEPT: usize = 64;
/// Where it listens, in the test's own namespace.
const LISTEN: &str = "127.0.0.1:8421";

pub(super) struct Nginx {
    child: Option<Child>,
    target: Target,
}

impl Nginx {
    #[track_caller]
    pub(super) fn start(folder: &Path, upstream: SocketAddr) -> Self {
        let folder = folder.join("nginx");
        std::fs::create_dir_all(&folder).expect("its folder");
        let own = folder.display();
        // What the edge tells the server, it tells too.
        let config = format!(
            "daemon off; user root; worker_processes {WORKERS}; pid {own}/pid; error_log {own}/error.log;\n\
             events {{ worker_connections 1024; }}\n\
             http {{\n\
             access_log off; keepalive_requests 1000000;\n\
             client_body_temp_path {own}/body; proxy_temp_path {own}/proxy; fastcgi_temp_path {own}/f; uwsgi_temp_path {own}/u; scgi_temp_path {own}/s;\n\
             upstream guest {{ server {upstream}; keepalive {KEPT}; keepalive_requests 1000000; }}\n\
             server {{\n\
             listen {LISTEN};\n\
             location / {{\n\
             proxy_pass http://guest; proxy_http_version 1.1; proxy_set_header Connection \"\";\n\
             proxy_set_header Host 127.0.0.1:{}; proxy_set_header X-Forwarded-Host $http_host;\n\
             proxy_set_header X-Forwarded-Proto $scheme; proxy_set_header X-Forwarded-For $remote_addr;\n\
             }} }} }}\n",
            upstream.port()
        );
        let path = folder.join("nginx.conf");
        std::fs::write(&path, config).expect("its settings");
        let mut command = Command::new("nginx");
        command.arg("-e").arg(folder.join("early.log")).arg("-c").arg(&path).stdin(Stdio::null());
        let child = command.spawn().expect("`nginx` starts");
        let server = LISTEN.parse().expect("an address");
        until("nginx listens", || TcpStream::connect(server as SocketAddr).ok());
        let nginx = Self { child: Some(child), target: Target { server, host: LISTEN.to_owned() } };
        let answer = net::http(server, LISTEN, "/nginx").expect("an answer");
        assert_eq!((answer.status, answer.body.as_str()), (200, "/nginx"), "{}", answer.head);
        nginx
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    /// It and its workers.
    pub(super) fn processes(&self) -> Vec<i32> {
        let Some(child) = &self.child else { return Vec::new() };
        let id = child.id();
        let list = format!("/proc/{id}/task/{id}/children");
        let workers = std::fs::read_to_string(list).unwrap_or_default();
        let workers = workers.split_whitespace().filter_map(|word| word.parse().ok());
        workers.chain(i32::try_from(id)).collect()
    }

    /// Ends it; its version.
    #[track_caller]
    pub(super) fn end(mut self) -> String {
        self.stop();
        let told = Command::new("nginx").arg("-v").output().expect("`nginx` starts");
        let told = String::from_utf8_lossy(&told.stderr).trim().to_owned();
        told.rsplit_once(": ").map_or(told.clone(), |(_, version)| version.to_owned())
    }

    fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            if let Ok(id) = i32::try_from(child.id()) {
                proc::kill(id, Signal::TERM);
            }
            // It ends by itself then; there is nothing to be done about one that cannot be waited for.
            let _ = child.wait();
        }
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        self.stop();
    }
}
