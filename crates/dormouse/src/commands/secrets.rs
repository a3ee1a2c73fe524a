//! Secrets: storing, listing, deleting. Values come from standard input or a file: arguments can be read by anybody on this machine.

use std::io::Read;

use api::secret::{PutSecret, SECRET_BYTES_MAX, Secret, SecretList};

use crate::account_args::SecretsCommand;
use crate::client::{Client, full, quote};
use crate::problem::Problem;
use crate::show;

pub(crate) async fn secrets(
    client: &Client,
    command: SecretsCommand,
    json: bool,
) -> Result<i32, Problem> {
    match command {
        SecretsCommand::Set { name, file } => {
            let value = match file {
                Some(path) => {
                    let failed = |error| Problem::usage(format!("{}: {error}", path.display()));
                    read(std::fs::File::open(&path).map_err(failed)?)?
                }
                None => read(std::io::stdin().lock())?,
            };
            let secret: Secret =
                client.json("PUT", &place(&name), Some(&PutSecret { value })).await?;
            if json {
                show::json(&secret)?;
            } else {
                show::data(&format!("stored {}", secret.name))?;
            }
        }
        SecretsCommand::List => {
            let SecretList { secrets } = client.get("/v1/secrets").await?;
            if json {
                show::json(&secrets)?;
            } else {
                let row =
                    |secret: &Secret| vec![secret.name.clone(), show::age(&secret.updated_at)];
                let rows: Vec<_> = secrets.iter().map(row).collect();
                show::table(&["NAME", "STORED"], &rows)?;
            }
        }
        SecretsCommand::Delete { names } => {
            for name in names {
                client.send(client.request("DELETE", &place(&name)), full("")).await?;
                if !json {
                    show::data(&format!("deleted {name}"))?;
                }
            }
        }
    }
    Ok(0)
}

/// A value as it is stored: without the line break that editors and `echo` end it with.
fn read(from: impl Read) -> Result<String, Problem> {
    let most = u64::try_from(SECRET_BYTES_MAX).unwrap_or(u64::MAX) + 2;
    let mut text = String::new();
    from.take(most)
        .read_to_string(&mut text)
        .map_err(|error| Problem::usage(format!("cannot read the value: {error}")))?;
    let length = text.strip_suffix("\r\n").or(text.strip_suffix('\n')).unwrap_or(&text).len();
    text.truncate(length);
    Ok(text)
}

fn place(name: &str) -> String {
    format!("/v1/secrets/{}", quote(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_break_at_the_end_is_none_of_the_value() {
        for (given, expected) in
            [("a\n", "a"), ("a\r\n", "a"), ("a", "a"), ("a\nb\n\n", "a\nb\n"), ("", "")]
        {
            assert_eq!(read(given.as_bytes()).expect("read"), expected, "{given:?}");
        }
    }
}
