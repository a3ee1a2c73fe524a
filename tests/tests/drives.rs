//! Drives: disks that outlive sandboxes.

use e2e::lab::Lab;
use e2e::{isolated, proc, test_name, until};

/// Keeps a file on a drive open, writes a line for each that it reads from a pipe, and says so.
const WRITER: &str = r"
import os
os.mkfifo('/work/in')
f = open('/data/log', 'a')
open('/work/ready', 'w').close()
while True:
    for line in open('/work/in'):
        f.write(line); f.flush()
        open('/work/said', 'w').write(line)
";

fn refused(lab: &Lab, args: &[&str], with: &str) {
    let output = lab.run(args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains(with), "{args:?}: {said}");
}

fn create(lab: &Lab, name: &str, drive: &str) {
    lab.ok(&["sandboxes", "create", "--name", name, "--memory-mib", "256", "--drive", drive]);
}

/// Has the program with the open file write a line.
fn write(lab: &Lab, sandbox: &str, line: &str) {
    let script = format!(
        "until test -e /work/ready; do sleep 0.1; done; echo {line} >/work/in; until grep -q {line} /work/said; do sleep 0.1; done"
    );
    lab.sh(sandbox, &script);
}

fn holder(lab: &Lab, drive: &str) -> Option<String> {
    let drive = lab.json(&["drives", "get", drive]);
    drive["attached_to"]["name"].as_str().map(str::to_owned)
}

#[test]
fn s22_a_drive_outlives_sandboxes_and_sleeps_with_them() {
    isolated(test_name!(), |lab| {
        lab.ok(&["drives", "create", "data", "--size", "1G"]);
        assert_eq!(lab.json(&["drives", "list"])[0]["size_mib"], 1024);
        assert_eq!(holder(lab, "data"), None);
        create(lab, "web", "data:/data");
        assert_eq!(holder(lab, "data").as_deref(), Some("web"));
        assert_eq!(lab.view("web")["drives"][0]["path"], "/data");
        let size: u64 =
            lab.sh("web", "df --output=size -k /data | tail -1").trim().parse().unwrap();
        assert!((900_000..1_048_576).contains(&size), "{size}");
        lab.write_file("web", "/work/writer.py", WRITER);
        lab.ok(&["exec", "web", "--background", "--", "python3", "/work/writer.py"]);
        write(lab, "web", "one");

        // A program with an open file goes on over both tiers, the daemon's death, and both.
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "memory"]);
        write(lab, "web", "two");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        write(lab, "web", "three");
        lab.kill_daemon();
        lab.start();
        write(lab, "web", "four");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "memory"]);
        lab.kill_daemon();
        lab.start();
        assert_eq!(holder(lab, "data").as_deref(), Some("web"), "known from the manifests");
        write(lab, "web", "five");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        lab.kill_daemon();
        lab.start();
        write(lab, "web", "six");

        // What is its own nobody else has, and it stays there.
        refused(lab, &["drives", "delete", "data"], "the sandbox `web` has the drive `data`");
        refused(
            lab,
            &["sandboxes", "create", "--drive", "data:/x"],
            "the sandbox `web` has the drive `data`",
        );
        refused(lab, &["sandboxes", "create", "--drive", "none:/x"], "no drive `none`");
        refused(lab, &["drives", "create", "data"], "already");
        assert_eq!(lab.json(&["sandboxes", "list"]).as_array().map(Vec::len), Some(1));
        lab.ok(&["sandboxes", "restart", "web"]);
        let lines = "one\ntwo\nthree\nfour\nfive\nsix";
        assert_eq!(lab.sh("web", "cat /data/log"), lines);
        assert_eq!(lab.view("web")["drives"][0]["name"], "data");

        // Written, and deleted awake at once; then asleep in each tier: it is on the drive, and the drive is in order.
        lab.sh("web", "echo last >/data/last");
        lab.ok(&["sandboxes", "delete", "web"]);
        assert_eq!(holder(lab, "data"), None);
        for tier in ["memory", "disk"] {
            create(lab, "next", "data:/srv/files");
            assert_eq!(
                lab.sh("next", "cat /srv/files/log /srv/files/last"),
                format!("{lines}\nlast")
            );
            lab.sh("next", &format!("echo {tier} >/srv/files/{tier}"));
            lab.ok(&["sandboxes", "sleep", "next", "--tier", tier]);
            lab.ok(&["sandboxes", "delete", "next"]);
            create(lab, "reader", "data:/data:ro");
            assert_eq!(lab.sh("reader", &format!("cat /data/{tier}")), tier);
            assert_eq!(
                lab.sh(
                    "reader",
                    "touch /data/x 2>/dev/null || mount -o remount,rw /data 2>/dev/null || echo no"
                ),
                "no"
            );
            lab.ok(&["sandboxes", "sleep", "reader", "--tier", "disk"]);
            assert_eq!(lab.sh("reader", "cat /data/last"), "last");
            lab.ok(&["sandboxes", "delete", "reader"]);
        }
        let taken = proc::disk_use(&lab.data().join("drives"));
        assert!(taken < 100 << 20, "{taken} bytes");
        lab.ok(&["drives", "delete", "data"]);
        assert_eq!(lab.json(&["drives", "list"]).as_array().map(Vec::len), Some(0));
    });
}

#[test]
fn s22_a_fork_and_a_snapshot_have_copies_of_drives() {
    isolated(test_name!(), |lab| {
        lab.ok(&["drives", "create", "data", "--size", "256"]);
        create(lab, "web", "data:/data");
        lab.write_file("web", "/work/writer.py", WRITER);
        lab.ok(&["exec", "web", "--background", "--", "python3", "/work/writer.py"]);
        write(lab, "web", "one");
        lab.ok(&["fork", "web", "--name", "awake"]);
        lab.ok(&["snapshots", "create", "web", "kept"]);
        write(lab, "web", "two");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        lab.ok(&["fork", "web", "--name", "asleep"]);
        lab.ok(&["sandboxes", "create", "--name", "made", "--snapshot", "kept"]);
        assert_eq!(holder(lab, "data").as_deref(), Some("web"));
        for (name, before) in
            [("awake", "one"), ("asleep", "one\ntwo"), ("made", "one"), ("web", "one\ntwo")]
        {
            // The program with the open file goes on in each, on a drive of its own.
            write(lab, name, name);
            assert_eq!(lab.sh(name, "cat /data/log"), format!("{before}\n{name}"));
            assert_eq!(lab.view(name)["drives"][0]["copy"] == true, name != "web");
        }
        refused(
            lab,
            &["sandboxes", "create", "--snapshot", "kept", "--drive", "data:/x"],
            "cannot be used",
        );
        // A copy of a copy, a restart of one; the copies go with their sandboxes.
        lab.ok(&["fork", "awake", "--name", "second"]);
        lab.ok(&["sandboxes", "restart", "second"]);
        assert_eq!(lab.sh("second", "cat /data/log"), "one\nawake");
        lab.ok(&["sandboxes", "delete", "web"]);
        assert_eq!(holder(lab, "data"), None, "copies do not hold it");
        create(lab, "other", "data:/data");
        assert_eq!(lab.sh("other", "cat /data/log"), "one\ntwo\nweb");
        assert_eq!(lab.sh("asleep", "cat /data/log"), "one\ntwo\nasleep");
    });
}

#[test]
fn s24_a_drive_of_a_machine_that_died_has_what_was_written_to_it() {
    isolated(test_name!(), |lab| {
        lab.ok(&["drives", "create", "data", "--size", "256"]);
        create(lab, "web", "data:/data");
        lab.sh("web", "echo kept >/data/kept; sync; echo lost >/data/lost");
        let [qemu] = proc::qemus_below(&lab.data())[..] else { panic!("one machine") };
        proc::kill(qemu, rustix::process::Signal::KILL);
        until("its end is noticed", || (lab.view("web")["sleep_tier"] == "off").then_some(()));
        assert_eq!(lab.view("web")["failure_code"], "machine_lost");
        assert_eq!(lab.sh("web", "cat /data/kept"), "kept");

        // Whoever died with it has not left it in order: it can be had for writing, not for reading only.
        let [qemu] = proc::qemus_below(&lab.data())[..] else { panic!("one machine") };
        proc::kill(qemu, rustix::process::Signal::KILL);
        until("its end is noticed", || (lab.view("web")["sleep_tier"] == "off").then_some(()));
        lab.ok(&["sandboxes", "delete", "web"]);
        refused(
            lab,
            &["sandboxes", "create", "--drive", "data:/data:ro"],
            "without leaving it in order",
        );
        create(lab, "next", "data:/data");
        assert_eq!(lab.sh("next", "cat /data/kept"), "kept");
        lab.ok(&["sandboxes", "delete", "next"]);
        create(lab, "reader", "data:/data:ro");
        assert_eq!(lab.sh("reader", "cat /data/kept"), "kept");
    });
}

#[test]
fn s17_a_drive_that_is_gone_or_damaged_is_said() {
    isolated(test_name!(), |lab| {
        lab.ok(&["drives", "create", "data", "--size", "64"]);
        create(lab, "web", "data:/data");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        let disk = lab.data().join("drives/data/disk");
        let away = lab.data().join("drives/data/away");
        std::fs::rename(&disk, &away).expect("moved");
        refused(
            lab,
            &["exec", "web", "--", "true"],
            "the drive `data` cannot be mounted: its disk is gone",
        );
        assert_eq!(lab.view("web")["failure_code"], "drive_unusable");
        std::fs::rename(&away, &disk).expect("moved back");
        lab.ok(&["sandboxes", "restart", "web"]);
        lab.sh("web", "echo there >/data/x");
        lab.ok(&["sandboxes", "delete", "web"]);

        let broken = std::fs::File::options().write(true).open(&disk).expect("opened");
        std::os::unix::fs::FileExt::write_all_at(&broken, &[0; 4096], 0).expect("written");
        refused(
            lab,
            &["sandboxes", "create", "--drive", "data:/data"],
            "the drive `data` cannot be mounted: ",
        );
        assert_eq!(lab.json(&["sandboxes", "list"]).as_array().map(Vec::len), Some(0));
        assert_eq!(holder(lab, "data"), None);
    });
}

#[test]
fn s17_a_drive_at_a_file_of_the_guest_is_said_with_its_cure() {
    isolated(test_name!(), |lab| {
        lab.ok(&["drives", "create", "good", "--size", "64"]);
        lab.ok(&["drives", "create", "data", "--size", "64"]);
        let error = |arguments: &[&str]| -> serde_json::Value {
            let output = lab.run(&[&["--json"], arguments].concat());
            assert!(!output.status.success(), "{arguments:?}");
            serde_json::from_slice(&output.stderr).expect("an error as JSON")
        };
        let mut create =
            vec!["sandboxes", "create", "--memory-mib", "256", "--drive", "good:/good", "--drive"];
        for (place, why) in [
            ("data:/etc/passwd", "cannot be mounted at `/etc/passwd`: a file is there"),
            ("data:/bin/sh/x", "cannot be mounted at `/bin/sh/x`: a part of this path is a file"),
        ] {
            create.push(place);
            let told = error(&create);
            println!("{told}");
            create.pop();
            assert_eq!(told["code"], "drive_unusable");
            assert_eq!(told["field"], "drives[1].path");
            assert!(told["error"].as_str().expect("text").contains(why), "{told}");
            assert!(told["hint"].as_str().expect("text").contains("name a folder"), "{told}");
            assert_eq!(lab.json(&["sandboxes", "list"]), serde_json::json!([]));
            assert_eq!(std::fs::read_dir(lab.data().join("sandboxes")).expect("listed").count(), 0);
            assert_eq!((holder(lab, "good"), holder(lab, "data")), (None, None));
        }

        lab.ok(&["sandboxes", "create", "--name", "web", "--memory-mib", "256"]);
        lab.sh("web", "echo kept >/work/kept; mkdir /work/folder; echo a file >/work/folder/file");
        let told = error(&["sandboxes", "restart", "web", "--drive", "data:/work/folder/file"]);
        println!("{told}");
        assert_eq!(told["code"], "drive_unusable");
        assert_eq!(told["field"], "drives[0].path");
        let view = lab.view("web");
        assert_eq!(view["failure_code"], "drive_unusable");
        let failure = view["failure"].as_str().expect("text");
        assert!(failure.contains("at `/work/folder/file`: a file is there"), "{failure}");
        for told in [told, error(&["exec", "web", "--", "true"])] {
            let hint = told["hint"].as_str().expect("a hint");
            assert!(hint.contains("another path"), "{told}");
        }
        // The cure that it names.
        lab.ok(&["sandboxes", "restart", "web", "--drive", "data:/work/folder/other"]);
        assert_eq!(lab.sh("web", "cat /work/kept; ls /work/folder/other"), "kept");
    });
}

#[test]
fn s15_a_restart_gives_other_drives_and_takes_them() {
    isolated(test_name!(), |lab| {
        for drive in ["one", "two"] {
            lab.ok(&["drives", "create", drive, "--size", "64"]);
        }
        lab.ok(&["sandboxes", "create", "--name", "web", "--memory-mib", "256"]);
        lab.sh("web", "echo here >/work/here; mkdir /data; echo below >/data/below");
        lab.ok(&[
            "sandboxes",
            "restart",
            "web",
            "--drive",
            "one:/data",
            "--drive",
            "two:/data/two",
        ]);
        assert_eq!(lab.sh("web", "cat /work/here; ls /data"), "here\ntwo");
        lab.sh("web", "echo 1 >/data/x; echo 2 >/data/two/x");
        lab.ok(&["fork", "web", "--name", "fork"]);
        for tier in ["memory", "disk"] {
            lab.ok(&["sandboxes", "sleep", "web", "--tier", tier]);
            assert_eq!(lab.sh("web", "cat /data/x /data/two/x"), "1\n2");
        }
        // One is taken from it, another place is given to the other.
        lab.ok(&["sandboxes", "restart", "web", "--drive", "two:/srv"]);
        assert_eq!(lab.sh("web", "cat /srv/x; ls /data"), "2\nbelow");
        assert_eq!((holder(lab, "one"), holder(lab, "two").as_deref()), (None, Some("web")));
        lab.ok(&["sandboxes", "create", "--name", "next", "--drive", "one:/data:ro"]);
        assert_eq!(lab.sh("next", "cat /data/x"), "1");
        refused(
            lab,
            &["sandboxes", "restart", "web", "--drive", "two:/srv", "--drive", "one:/x"],
            "`next` has the drive `one`",
        );
        assert_eq!(lab.sh("web", "cat /srv/x"), "2", "as it was");
        assert_eq!(holder(lab, "two").as_deref(), Some("web"));
        lab.kill_daemon();
        lab.start();
        assert_eq!(
            (holder(lab, "one").as_deref(), holder(lab, "two").as_deref()),
            (Some("next"), Some("web"))
        );
        lab.ok(&["sandboxes", "restart", "web", "--no-drives"]);
        assert_eq!(lab.sh("web", "cat /data/below"), "below");
        lab.ok(&["drives", "delete", "two"]);
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        assert_eq!(lab.sh("web", "cat /data/below"), "below");

        // The fork has its copies, until it is given something else.
        lab.ok(&["sandboxes", "restart", "fork"]);
        assert_eq!(lab.sh("fork", "cat /data/x /data/two/x"), "1\n2");
        let id = lab.view("fork")["id"].as_str().expect("an id").to_owned();
        let copies = || {
            (0..8).filter(|n| lab.data().join(format!("sandboxes/{id}/drive-{n}")).exists()).count()
        };
        assert_eq!(copies(), 2);
        lab.ok(&["sandboxes", "restart", "fork", "--no-drives"]);
        assert_eq!(copies(), 0);
    });
}

#[test]
fn s22_many_share_a_volume_and_none_writes_it() {
    isolated(test_name!(), |lab| {
        let folder = lab.scratch().join("models");
        std::fs::create_dir_all(folder.join("deep/er")).expect("made");
        std::fs::write(folder.join("deep/er/weights"), vec![7; 3 << 20]).expect("written");
        std::fs::write(folder.join("run.sh"), "#!/bin/sh\necho runs\n").expect("written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(folder.join("run.sh"), mode).expect("permissions");
        std::os::unix::fs::symlink("deep/er/weights", folder.join("link")).expect("linked");
        let folder = folder.to_string_lossy().into_owned();
        lab.ok(&["volumes", "create", "models", &folder]);
        let volume = lab.json(&["volumes", "get", "models"]);
        assert_eq!(
            (&volume["content_bytes"], &volume["attached_to"]),
            (&(3 * (1 << 20) + 20).into(), &serde_json::json!([]))
        );
        lab.ok(&["drives", "create", "data", "--size", "64"]);

        let look = "md5sum </models/link; /models/run.sh; touch /models/x 2>/dev/null || mount -o remount,rw /models 2>/dev/null || echo no";
        let one = "sandboxes create --name one --memory-mib 256 --volume models:/models --drive data:/data";
        lab.ok(&one.split(' ').collect::<Vec<_>>());
        let seen = lab.sh("one", look);
        assert!(seen.ends_with("runs\nno"), "{seen}");
        let two = "sandboxes create --name two --memory-mib 256 --volume models:/models";
        lab.ok(&two.split(' ').collect::<Vec<_>>());
        assert_eq!(lab.sh("two", look), seen);
        // Asleep, forked, kept, restarted, found again by another daemon: it is there.
        for tier in ["memory", "disk"] {
            lab.ok(&["sandboxes", "sleep", "one", "--tier", tier]);
            assert_eq!(lab.sh("one", look), seen);
        }
        lab.sh("one", "echo own >/data/x");
        lab.ok(&["fork", "one", "--name", "three"]);
        lab.ok(&["snapshots", "create", "one", "kept"]);
        lab.ok(&["sandboxes", "create", "--name", "four", "--snapshot", "kept"]);
        lab.ok(&["sandboxes", "restart", "two"]);
        for name in ["two", "three", "four"] {
            assert_eq!(lab.sh(name, look), seen, "{name}");
            assert_eq!(lab.view(name)["volumes"][0]["path"], "/models");
        }
        assert_eq!(lab.sh("three", "cat /data/x"), "own");
        lab.kill_daemon();
        lab.start();
        let users = lab.json(&["volumes", "get", "models"])["attached_to"].as_array().map(Vec::len);
        assert_eq!(users, Some(4));
        refused(lab, &["volumes", "create", "models", &folder], "already");
        refused(lab, &["sandboxes", "create", "--volume", "none:/x"], "no volume `none`");
        refused(lab, &["volumes", "delete", "models"], "(and 3 more) has the volume `models`");

        // A restart takes it and leaves the drives, also a fork's copies.
        lab.ok(&["sandboxes", "restart", "three", "--no-volumes"]);
        assert_eq!(lab.sh("three", "cat /data/x; ls /models | wc -l"), "own\n0");
        lab.ok(&["sandboxes", "restart", "three", "--volume", "models:/srv/models"]);
        assert_eq!(lab.sh("three", "cat /data/x; /srv/models/run.sh"), "own\nruns");
        lab.ok(&["sandboxes", "delete", "one", "two", "three", "four"]);
        refused(lab, &["volumes", "delete", "models"], "the snapshot `kept` has the volume");
        lab.ok(&["snapshots", "delete", "kept"]);
        lab.ok(&["volumes", "delete", "models"]);
        assert_eq!(lab.json(&["volumes", "list"]).as_array().map(Vec::len), Some(0));
    });
}
