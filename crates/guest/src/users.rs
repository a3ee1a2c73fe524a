//! Users, looked up in `/etc/passwd` and `/etc/group` by ourselves: a static program has no name service switch.

use std::{fs, io, path::Path};

use wire::{Failure, FailureCode};

use crate::failure::{failure, io_failure};

/// Supplementary groups of one user; the kernel's own limit is 65,536, real systems have dozens.
const GROUPS_MAX: usize = 256;

/// Whom a program runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) home: String,
    pub(crate) shell: String,
}

/// Finds a user by name or number; a number need not be in `/etc/passwd`.
pub(crate) fn find(etc: &Path, wanted: &str) -> Result<User, Failure> {
    let passwd = read(&etc.join("passwd"))?;
    let number = wanted.parse::<u32>().ok();
    let found = passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, gid, _, home, shell] = fields[..] else { return None };
        let uid = uid.parse().ok()?;
        (name == wanted || number == Some(uid)).then(|| User {
            name: name.to_owned(),
            uid,
            gid: gid.parse().unwrap_or(uid),
            groups: Vec::new(),
            home: or(home, "/"),
            shell: or(shell, "/bin/sh"),
        })
    });
    let mut user = match (found, number) {
        (Some(user), _) => user,
        // Root must be there even in an image without /etc/passwd.
        (None, _) if wanted == "root" => plain("root", 0, "/root"),
        (None, Some(uid)) => plain(wanted, uid, "/"),
        (None, None) => {
            let message = format!("the guest has no user `{wanted}`");
            return Err(failure(FailureCode::UnknownUser, Some("user"), message));
        }
    };
    user.groups = groups(&read(&etc.join("group"))?, &user);
    Ok(user)
}

fn plain(name: &str, uid: u32, home: &str) -> User {
    User {
        name: name.to_owned(),
        uid,
        gid: uid,
        groups: Vec::new(),
        home: home.to_owned(),
        shell: "/bin/sh".to_owned(),
    }
}

fn groups(group: &str, user: &User) -> Vec<u32> {
    let mut groups = vec![user.gid];
    for line in group.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        if let [_, _, gid, members] = fields[..]
            && members.split(',').any(|member| member == user.name)
            && let Ok(gid) = gid.parse()
            && !groups.contains(&gid)
            && groups.len() < GROUPS_MAX
        {
            groups.push(gid);
        }
    }
    groups
}

fn read(path: &Path) -> Result<String, Failure> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(io_failure(&error, "user", &format!("read {}", path.display()))),
    }
}

fn or(text: &str, default: &str) -> String {
    if text.is_empty() { default.to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_number_with_their_groups() {
        let etc = tempfile::tempdir().expect("temp dir");
        let write = |name: &str, text: &str| {
            fs::write(etc.path().join(name), text).expect("write");
        };
        write("passwd", "root:x:0:0:root:/root:/bin/bash\nann:x:1000:1001::/home/ann:\nbroken\n");
        write("group", "root:x:0:\nann:x:1001:\naudio:x:29:bob,ann\nsudo:x:27:ann\n");
        let ann = find(etc.path(), "ann").expect("ann");
        assert_eq!(find(etc.path(), "1000"), Ok(ann.clone()));
        assert_eq!((ann.uid, ann.gid, ann.groups), (1000, 1001, vec![1001, 29, 27]));
        assert_eq!((ann.home.as_str(), ann.shell.as_str()), ("/home/ann", "/bin/sh"));
        assert_eq!(find(etc.path(), "4242").expect("number").gid, 4242);
        let unknown = find(etc.path(), "eve").expect_err("no eve");
        assert_eq!(
            (unknown.code, unknown.field.as_deref()),
            (FailureCode::UnknownUser, Some("user"))
        );
    }
}
