//! Terminals of the fake host: commands whose output is taken for what is on the screen, of a size that nobody is told.

use api::exec::{Exec, ExecRequest, Output};
use api::host::{Answer, Host, OutputEvent, OutputFrom};
use api::terminal::{
    Terminal, TerminalEvent, TerminalHost, TerminalRequest, TerminalScreen, TerminalSize,
};
use api::{ApiError, SandboxId};
use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::fake::Fake;

const SIZE: TerminalSize = TerminalSize { columns: 80, rows: 24 };

fn terminal(exec: &Exec, size: TerminalSize) -> Terminal {
    Terminal {
        terminal_id: exec.exec_id.clone(),
        pid: exec.pid,
        status: exec.status,
        command: exec.command.clone(),
        columns: size.columns,
        rows: size.rows,
        viewers: 0,
        exit: exec.exit,
    }
}

#[async_trait]
impl TerminalHost for Fake {
    async fn terminal_start(
        &self,
        id: &SandboxId,
        request: TerminalRequest,
    ) -> Result<Answer<Terminal>, ApiError> {
        let run = ExecRequest {
            argv: request.argv.or_else(|| Some(vec!["cat".into()])),
            env: request.env,
            open_stdin: true,
            background: true,
            ..ExecRequest::default()
        };
        let size = TerminalSize {
            columns: request.columns.unwrap_or(SIZE.columns),
            rows: request.rows.unwrap_or(SIZE.rows),
        };
        Ok(self.exec_start(id, run).await?.map(|exec| terminal(&exec, size)))
    }

    async fn terminal_list(&self, id: &SandboxId) -> Result<Vec<Terminal>, ApiError> {
        Ok(self.exec_list(id).await?.value.iter().map(|exec| terminal(exec, SIZE)).collect())
    }

    async fn terminal_view(&self, id: &SandboxId, of: &str) -> Result<Terminal, ApiError> {
        Ok(terminal(&self.exec_view(id, of).await?.value, SIZE))
    }

    async fn terminal_screen(&self, id: &SandboxId, of: &str) -> Result<TerminalScreen, ApiError> {
        let from = OutputFrom { stdout: Some(0), stderr: None, follow: false, hold: false };
        let mut output = self.exec_output(id, of, from).await?.value;
        let mut text = String::new();
        while let Some(event) = output.recv().await {
            if let OutputEvent::Data { bytes, .. } = event? {
                text.push_str(std::str::from_utf8(&bytes).unwrap());
            }
        }
        let TerminalSize { columns, rows } = SIZE;
        Ok(TerminalScreen { text, cursor_row: 0, cursor_column: 0, columns, rows })
    }

    async fn terminal_attach(
        &self,
        id: &SandboxId,
        of: &str,
    ) -> Result<mpsc::Receiver<Result<TerminalEvent, ApiError>>, ApiError> {
        let screen = self.terminal_screen(id, of).await?.text;
        let stdout = Some(screen.len() as u64);
        let from = OutputFrom { stdout, stderr: None, follow: true, hold: false };
        let mut output = self.exec_output(id, of, from).await?.value;
        let (sender, receiver) = mpsc::channel(4);
        tokio::spawn(async move {
            let mut event = Ok(TerminalEvent::Screen(SIZE, screen.into()));
            while sender.send(event).await.is_ok() {
                event = match output.recv().await {
                    Some(Ok(OutputEvent::Data { stream: Output::Stdout, bytes, .. })) => {
                        Ok(TerminalEvent::Output(bytes))
                    }
                    Some(Ok(OutputEvent::Exit(exit))) => Ok(TerminalEvent::Exit(exit)),
                    Some(Ok(OutputEvent::Data { stream: Output::Stderr, .. })) | None => return,
                    Some(Err(error)) => Err(error),
                };
            }
        });
        Ok(receiver)
    }

    async fn terminal_input(
        &self,
        id: &SandboxId,
        of: &str,
        bytes: Bytes,
    ) -> Result<Answer<()>, ApiError> {
        // As a terminal takes it: the control character says the end.
        let close = bytes.ends_with(b"\x04");
        let bytes = if close { bytes.slice(..bytes.len() - 1) } else { bytes };
        self.exec_stdin(id, of, bytes, close).await
    }

    async fn terminal_resize(
        &self,
        id: &SandboxId,
        of: &str,
        size: TerminalSize,
    ) -> Result<Terminal, ApiError> {
        Ok(terminal(&self.exec_view(id, of).await?.value, size))
    }

    async fn terminal_close(&self, id: &SandboxId, of: &str) -> Result<Answer<()>, ApiError> {
        self.exec_signal(id, of, 9).await
    }
}
