//! Debian's archive: where its mirror is, and a private apt that touches nothing of the host's own.
//!
//! The host's `apt.conf` stays in force (proxies, certificates); its sources, lists, cache and the record of
//! what is installed do not.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Command;

use super::disk::at;
use super::{ImageError, commands};

/// The keys that Debian signs its archive with.
pub(super) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// The package they are in.
const KEYRING_PACKAGE: &str = "debian-archive-keyring";

/// Debian's own mirror, used where the host's apt names none.
const MIRROR: &str = "http://deb.debian.org/debian";
/// Debian's own mirror of security updates.
const SECURITY_MIRROR: &str = "http://deb.debian.org/debian-security";

/// How long fetching one package or one index may take: a slow line needs minutes for 35 MB.
const FETCH_LIMIT: Duration = Duration::from_mins(10);

/// Where Debian's packages come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mirrors {
    pub(super) main: String,
    pub(super) security: String,
}

impl Mirrors {
    /// What the host's own apt uses, with Debian's own where it names none.
    pub(super) fn of_host() -> Result<Self, ImageError> {
        let folder = Path::new("/etc/apt/sources.list.d");
        let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
        if folder.is_dir() {
            for entry in fs::read_dir(folder).map_err(at("list", folder))? {
                files.push(entry.map_err(at("list", folder))?.path());
            }
        }
        files.sort();
        let mut text = String::new();
        for file in files.iter().filter(|file| file.is_file()) {
            text.push_str(&fs::read_to_string(file).map_err(at("read", file))?);
            text.push_str("\n\n");
        }
        Ok(Self::read(&text))
    }

    /// Finds them in the text of apt's source files, of either style.
    fn read(text: &str) -> Self {
        let mut found = Self { main: MIRROR.to_owned(), security: SECURITY_MIRROR.to_owned() };
        let is_ours = |url: &&str, components: &[&str], end: &str| {
            let url = url.trim_end_matches('/');
            url.rsplit('/').next() == Some(end)
                && components.contains(&"main")
                && check_mirror(url).is_ok()
        };
        for block in text.split("\n\n") {
            // One-line style: deb [options] URL SUITE COMPONENT...
            let mut sources = Vec::new();
            for line in block.lines().map(str::trim).filter(|line| line.starts_with("deb ")) {
                let line = match (line.find('['), line.find(']')) {
                    (Some(from), Some(to)) if from < to => {
                        format!("{}{}", &line[..from], &line[to + 1..])
                    }
                    _ => line.to_owned(),
                };
                let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
                if words.len() > 3 {
                    sources.push((words[1].clone(), words[3..].to_vec()));
                }
            }
            // Fields in a paragraph.
            let field = |name: &str| {
                let lines = block.lines().filter(|line| !line.starts_with('#'));
                lines
                    .filter_map(|line| line.split_once(':'))
                    .find(|(key, _)| *key == name)
                    .map(|(_, v)| v.trim())
            };
            let deb =
                field("Types").is_some_and(|types| types.split_whitespace().any(|t| t == "deb"));
            if let (true, Some(urls), Some(components)) = (deb, field("URIs"), field("Components"))
            {
                let components: Vec<_> = components.split_whitespace().map(str::to_owned).collect();
                sources.extend(
                    urls.split_whitespace().map(|url| (url.to_owned(), components.clone())),
                );
            }
            for (url, components) in sources.iter().rev() {
                let components: Vec<_> = components.iter().map(String::as_str).collect();
                if is_ours(&url.as_str(), &components, "debian") {
                    url.trim_end_matches('/').clone_into(&mut found.main);
                } else if is_ours(&url.as_str(), &components, "debian-security") {
                    url.trim_end_matches('/').clone_into(&mut found.security);
                }
            }
        }
        found
    }

    /// Lines for a `sources.list`, and the distributions in them: a release with its updates.
    pub(super) fn sources(&self, suite: &str) -> Vec<String> {
        vec![
            source(&self.main, suite),
            source(&self.main, &format!("{suite}-updates")),
            source(&self.security, &format!("{suite}-security")),
        ]
    }
}

/// One line for a `sources.list`.
pub(super) fn source(mirror: &str, suite: &str) -> String {
    format!("deb [signed-by={KEYRING}] {mirror} {suite} main")
}

/// Refuses an address that would be read as more than an address.
pub(super) fn check_mirror(url: &str) -> Result<(), ImageError> {
    let is_web = url.starts_with("http://") || url.starts_with("https://");
    let is_plain = url.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~:/@%+".contains(&b));
    if is_web && is_plain { Ok(()) } else { Err(ImageError::BadMirror { url: url.to_owned() }) }
}

/// Refuses a name that would be read as more than a name.
pub(super) fn check_package(name: &str) -> Result<(), ImageError> {
    let begins = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let is_plain =
        name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b));
    // A trailing `-` or `+` tells apt to remove or install what stands before it.
    if begins && is_plain && !name.ends_with('-') && name.len() > 1 {
        Ok(())
    } else {
        Err(ImageError::BadPackage { name: name.to_owned() })
    }
}

/// The keyring must be there before anything is trusted.
pub(super) fn need_keyring() -> Result<(), ImageError> {
    let path = PathBuf::from(KEYRING);
    if path.is_file() {
        Ok(())
    } else {
        Err(ImageError::MissingFile { path, package: KEYRING_PACKAGE })
    }
}

/// An apt of our own in a scratch folder.
#[derive(Debug)]
pub(super) struct PrivateApt {
    dir: PathBuf,
}

impl PrivateApt {
    /// Lays it out in `dir`, which must exist, with these sources.
    pub(super) fn new(dir: &Path, sources: &[String]) -> Result<Self, ImageError> {
        need_keyring()?;
        for folder in ["lists/partial", "archives/partial", "sources.d"] {
            let path = dir.join(folder);
            fs::create_dir_all(&path).map_err(at("create folder", &path))?;
        }
        for (file, text) in [("sources.list", sources.join("\n") + "\n"), ("status", String::new())]
        {
            let path = dir.join(file);
            fs::write(&path, text).map_err(at("write", &path))?;
        }
        Ok(Self { dir: dir.to_owned() })
    }

    /// Fetches the lists of packages.
    pub(super) async fn update(&self) -> Result<(), ImageError> {
        let mut command = self.command("apt-get")?;
        // Without this apt takes a failed fetch for a warning and goes on with old lists: here, none.
        command.args(["--error-on=any", "update"]);
        commands::run(command, "fetch Debian's list of packages", FETCH_LIMIT, &mut |_| {}).await?;
        Ok(())
    }

    /// The record of a package: `Name: value` lines of its newest version.
    pub(super) async fn show(&self, package: &str) -> Result<String, ImageError> {
        let mut command = self.command("apt-cache")?;
        command.args(["show", "--no-all-versions", package]);
        commands::run(command, "look a package up", FETCH_LIMIT, &mut |_| {}).await
    }

    /// Fetches a package, its signature and checksum verified, without installing it.
    pub(super) async fn download(&self, package: &str) -> Result<PathBuf, ImageError> {
        let into = self.dir.join("downloads");
        fs::create_dir_all(&into).map_err(at("create folder", &into))?;
        let mut command = self.command("apt-get")?;
        command.args(["download", package]).current_dir(&into);
        commands::run(command, "fetch a package", FETCH_LIMIT, &mut |_| {}).await?;
        let entries = fs::read_dir(&into).map_err(at("list", &into))?;
        let files = entries.collect::<Result<Vec<_>, _>>().map_err(at("list", &into))?;
        match files.as_slice() {
            [file] => Ok(file.path()),
            other => Err(ImageError::Unexpected {
                doing: "fetch a package",
                what: format!("`apt-get download {package}` left {} files", other.len()),
            }),
        }
    }

    fn command(&self, program: &'static str) -> Result<Command, ImageError> {
        let mut command = Command::new(commands::program(program, "apt")?);
        let mut option = |name: &str, value: &Path| {
            let mut text = OsString::from(name);
            text.push("=");
            text.push(value);
            command.arg("-o").arg(text);
        };
        option("Dir::Etc::SourceList", &self.dir.join("sources.list"));
        option("Dir::Etc::SourceParts", &self.dir.join("sources.d"));
        option("Dir::Etc::Preferences", Path::new("/dev/null"));
        option("Dir::Etc::PreferencesParts", &self.dir.join("sources.d"));
        option("Dir::State", &self.dir);
        option("Dir::State::status", &self.dir.join("status"));
        option("Dir::Cache", &self.dir);
        command.args(["-q", "-o", "APT::Architecture=amd64", "-o", "APT::Architectures=amd64"]);
        // The scratch folder is root's; apt's own user could not write there and apt would warn.
        command.args([
            "-o",
            "APT::Sandbox::User=root",
            "-o",
            "Acquire::Languages=none",
            "-o",
            "Acquire::Retries=3",
        ]);
        Ok(command)
    }
}

/// Value of a field in a package's record.
pub(super) fn field<'a>(record: &'a str, name: &str) -> Option<&'a str> {
    record
        .lines()
        .filter_map(|line| line.split_once(": "))
        .find(|(key, _)| *key == name)
        .map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (String, String) {
        let Mirrors { main, security } = Mirrors::read(text);
        (main, security)
    }

    #[test]
    fn mirrors_are_found_in_either_style_and_strangers_are_passed_over() {
        let own = (MIRROR.to_owned(), SECURITY_MIRROR.to_owned());
        assert_eq!(read(""), own);
        assert_eq!(read("deb https://download.docker.example/linux/debian bookworm stable\n"), own);
        assert_eq!(read("# deb http://old.example/debian bookworm main\n"), own);
        assert_eq!(read("deb mirror+file:/etc/apt/mirrors/debian.list bookworm main\n"), own);
        let near = (
            "http://near.example/debian".to_owned(),
            "http://near.example/debian-security".to_owned(),
        );
        assert_eq!(
            read(
                "deb [arch=amd64 signed-by=/k.gpg] http://near.example/debian/ bookworm main contrib\n\
                 deb http://near.example/debian-security bookworm-security main\n"
            ),
            near
        );
        assert_eq!(
            read(
                "Types: deb\n# URIs: http://no.example/debian\nURIs: http://near.example/debian\n\
                 Suites: bookworm\nComponents: main\n\nTypes: deb\nURIs: http://near.example/debian-security\n\
                 Suites: bookworm-security\nComponents: main\n"
            ),
            near
        );
    }

    #[test]
    fn names_and_addresses_that_apt_could_misread_are_refused() {
        for good in ["python3", "g++", "libc6", "linux-image-6.12.95+deb12-cloud-amd64"] {
            assert!(check_package(good).is_ok(), "{good}");
        }
        for bad in ["", "x", "-o", "bash-", "a b", "a/bookworm-backports", "Bash", "a=1", "a,b"] {
            assert!(check_package(bad).is_err(), "{bad}");
        }
        assert!(check_mirror("https://near.example:8080/debian").is_ok());
        for bad in ["near.example", "file:/x", "http://a b", "http://a] c", "http://a\ndeb x"] {
            assert!(check_mirror(bad).is_err(), "{bad}");
        }
    }
}
