//! An upgrade of the host's QEMU under sleepers in every tier, and under a living daemon.
//!
//! By itself it is one to the same release in another build, for there is one QEMU on a machine. `DORMOUSE_NEXT_QEMU` names a folder
//! with another release, unpacked there (`dpkg -x`): then it is one to that.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use e2e::lab::Lab;
use e2e::{isolated, net, proc, test_name};

/// The build that is installed at first.
const FIRST: &str = "the first";

/// An emulator of the test's own, in a tree like the system's so that it finds its firmware and modules.
fn install(lab: &Lab) -> PathBuf {
    let tree = lab.scratch().join("usr");
    fs::create_dir_all(tree.join("bin")).expect("a folder");
    for shared in ["lib", "share"] {
        symlink(Path::new("/usr").join(shared), tree.join(shared)).expect("a link");
    }
    let qemu = tree.join("bin/qemu-system-x86_64");
    upgrade(&qemu, FIRST);
    qemu
}

/// The folder with another release, if there is one.
fn next_release() -> Option<PathBuf> {
    std::env::var_os("DORMOUSE_NEXT_QEMU").map(|tree| PathBuf::from(tree).join("usr"))
}

/// Has the system's data of QEMU be those of another release: where its package puts them, for it may look nowhere else.
fn upgrade_data(tree: &Path) {
    for part in ["share/qemu", "share/seabios", "lib/x86_64-linux-gnu/qemu"] {
        let (from, to) = (tree.join(part), Path::new("/usr").join(part));
        // In this test's own mount namespace.
        net::output("mount", &["--bind", &from.to_string_lossy(), &to.to_string_lossy()]);
    }
}

/// Replaces it as a package does: another file under the same name. What stands behind a program changes nothing but its digest.
fn upgrade(qemu: &Path, build: &str) {
    let fresh = qemu.with_extension("new");
    let release = next_release().filter(|_| build != FIRST).unwrap_or_else(|| "/usr".into());
    fs::copy(release.join("bin/qemu-system-x86_64"), &fresh).expect("copied");
    let mut file = OpenOptions::new().append(true).open(&fresh).expect("opened");
    file.write_all(build.as_bytes()).expect("written");
    drop(file);
    fs::rename(&fresh, qemu).expect("replaced");
}

fn create(lab: &Lab, name: &str) {
    lab.ok(&["sandboxes", "create", "--name", name, "--sleep-after-seconds", "never"]);
    lab.sh(
        name,
        "echo $$ > /dev/shm/memory; head -c 8 /dev/urandom | od -An -tx1 >> /dev/shm/memory",
    );
}

fn memory(lab: &Lab, name: &str) -> String {
    lab.sh(name, "cat /dev/shm/memory")
}

/// The digest by which an emulator's folder is named.
fn emulator_of(lab: &Lab, name: &str) -> String {
    let id = lab.view(name)["id"].as_str().expect("an id").to_owned();
    let [pid] = proc::qemus_below(&lab.data().join("sandboxes").join(id))[..] else {
        panic!("{name} has not one QEMU")
    };
    let program = fs::read_link(format!("/proc/{pid}/exe")).expect("its program");
    program.to_string_lossy().into_owned()
}

/// The release under which it runs.
fn release_of(lab: &Lab, name: &str) -> String {
    let id = lab.view(name)["id"].as_str().expect("an id").to_owned();
    let manifest = lab.data().join("sandboxes").join(id).join("manifest.json");
    let manifest = fs::read(&manifest).expect("its manifest");
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).expect("JSON");
    manifest["sandbox"]["machine"]["qemu_version"].as_str().expect("a release").to_owned()
}

#[test]
fn s07_sleepers_in_every_tier_outlast_an_upgrade_of_qemu() {
    isolated(test_name!(), |lab| {
        let qemu = install(lab);
        lab.stop_daemon();
        lab.daemon_env.push(("DORMOUSE_QEMU".to_owned(), qemu.to_string_lossy().into_owned()));
        lab.start();
        let names = ["disk", "memory", "running"];
        for name in names {
            create(lab, name);
        }
        let before = names.map(|name| memory(lab, name));
        lab.ok(&["snapshots", "create", "running", "kept"]);
        lab.ok(&["sandboxes", "sleep", "disk", "--tier", "disk"]);
        lab.ok(&["sandboxes", "sleep", "memory", "--tier", "memory"]);

        lab.stop_daemon();
        if let Some(tree) = next_release() {
            upgrade_data(&tree);
        }
        upgrade(&qemu, "the second");
        lab.start();
        for (name, before) in names.iter().zip(&before) {
            assert_eq!(memory(lab, name), *before, "{name}");
        }
        // What the first wrote only the first reads, also after the next sleep.
        for name in names {
            for _ in 0..2 {
                lab.ok(&["sandboxes", "sleep", name, "--tier", "disk"]);
                memory(lab, name);
            }
            let emulator = emulator_of(lab, name);
            assert!(emulator.contains("/emulators/"), "{name} runs on {emulator}");
        }
        for (name, before) in names.iter().zip(&before) {
            assert_eq!(memory(lab, name), *before, "{name}");
        }
        lab.ok(&["sandboxes", "create", "--name", "copy", "--snapshot", "kept"]);
        assert_eq!(memory(lab, "copy"), before[2]);
        // Whatever boots anew, and whatever is made, runs on the second.
        lab.ok(&["sandboxes", "restart", "disk"]);
        create(lab, "new");
        for name in ["disk", "new"] {
            let emulator = emulator_of(lab, name);
            assert!(emulator.starts_with(&*qemu.to_string_lossy()), "{name} runs on {emulator}");
        }
        let releases = ["running", "new"].map(|name| release_of(lab, name));
        println!("from QEMU {} to {}", releases[0], releases[1]);
        assert_eq!(releases[0] != releases[1], next_release().is_some(), "{releases:?}");

        // Under a living daemon: it goes on with what it found at its start.
        let new = memory(lab, "new");
        upgrade(&qemu, "the third");
        lab.ok(&["sandboxes", "sleep", "new", "--tier", "disk"]);
        assert_eq!(memory(lab, "new"), new);
        lab.ok(&["sandboxes", "restart", "copy"]);
        for name in ["new", "copy"] {
            let emulator = emulator_of(lab, name);
            assert!(emulator.contains("/emulators/"), "{name} runs on {emulator}");
        }

        // The next daemon keeps those that somebody needs, and the third.
        let kept = || fs::read_dir(lab.data().join("emulators")).expect("kept").count();
        assert_eq!(kept(), 2);
        for name in ["memory", "running", "disk"] {
            lab.ok(&["sandboxes", "delete", name]);
        }
        lab.ok(&["snapshots", "delete", "kept"]);
        let data = lab.data();
        lab.stop_daemon();
        lab.start();
        let kept = fs::read_dir(data.join("emulators")).expect("kept").count();
        assert_eq!(kept, 2, "the second, for two that run on it, and the third");
        assert_eq!(memory(lab, "new"), new);
    });
}
