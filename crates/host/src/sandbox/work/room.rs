//! What has to be there before a machine is begun: room in memory and on the disk, its drives, a turn.

use std::convert::Infallible;
use std::path::PathBuf;
use std::time::Instant;

use lifecycle::{FailureCode, Left};

use super::{Failed, Worker, chain, failed};
use crate::drive_trouble;
use crate::ground::{FREE_BYTES_MIN, FREE_BYTES_TO_SLEEP, free_bytes};
use crate::manifest::Manifest;
use crate::promises::{NoRoom, Promise, bytes_to_copy_all};
use crate::sandbox::body::drive_image;
use crate::turns::{Place, Turn, Urgency};

impl Worker {
    /// Whether the disks of its drives are there.
    pub(super) fn check_drives(&self, manifest: &Manifest, left: Left) -> Result<(), Failed> {
        let mut drives = manifest.drives.iter().enumerate();
        let missing = drives.find(|(place, drive)| {
            !drive_image(&self.ground, &self.body.files, *place, drive).exists()
        });
        let Some((_, drive)) = missing else { return Ok(()) };
        let error = drive_trouble::gone(drive);
        Err(Failed { code: FailureCode::DriveUnusable, left, error })
    }

    /// Waits for room in memory and then for a turn to be brought back from disk, each in order of arrival.
    pub(super) async fn take_turn(&mut self, memory_mib: u32) -> Result<Turn, Failed> {
        let mut place = self.place.take();
        let urgency = place.as_ref().map_or(Urgency::Call, Place::urgency);
        if self.body.seat.is_none() {
            self.body.seat = self.ground.budget.seat_if_free(memory_mib);
        }
        if self.body.seat.is_none() {
            // Others may have its turn meanwhile.
            drop(place.take());
            self.take_seat(urgency, memory_mib, Left::Asleep).await?;
        }
        let place =
            place.unwrap_or_else(|| self.ground.restores.stand_in_line(urgency, Instant::now()));
        let turn = self.unless_superseded(async { Ok::<_, Infallible>(place.turn().await) }).await;
        turn.map_err(|error| failed(FailureCode::WakeFailed, Left::Asleep, &error))
    }

    /// Waits for room in memory, in order of arrival and urgency.
    pub(super) async fn take_seat(
        &mut self,
        urgency: Urgency,
        memory_mib: u32,
        left: Left,
    ) -> Result<(), Failed> {
        if self.body.seat.is_some() {
            return Ok(());
        }
        let limit = self.ground.settings.memory_wait;
        let seat = self.ground.budget.seat(Some(&self.id), urgency, memory_mib, limit);
        let seat = self.unless_superseded(seat).await;
        let error = match seat {
            Ok(seat) => {
                self.body.seat = Some(seat);
                self.phases.mark("room");
                return Ok(());
            }
            Err(error) => chain(&error),
        };
        Err(Failed { code: FailureCode::NoCapacity, left, error })
    }

    /// Refuses when the disk has less than this left beside what is promised to copies: a guest that finds no room for a page of
    /// its memory dies of it.
    pub(super) fn check_room(&self, bytes: u64, left: Left) -> Result<(), Failed> {
        self.ground.room.check(bytes).map_err(|error| no_room(&error, left))
    }

    /// The same for one that is to sleep: what it writes is little, and asleep it needs no more. What is promised is left out.
    pub(super) fn check_room_to_sleep(&self) -> Result<(), Failed> {
        let free = free_bytes(&self.ground.settings.sandboxes_dir());
        let free = free.map_err(|error| no_room(&error.into(), Left::Awake))?;
        if free < FREE_BYTES_TO_SLEEP {
            let least_left = FREE_BYTES_TO_SLEEP;
            let error = NoRoom::Short { free, promised: 0, bytes: 0, least_left };
            return Err(no_room(&error, Left::Awake));
        }
        Ok(())
    }

    /// Room for copies of these files, until the promise is dropped.
    pub(super) async fn promise_copies(
        &self,
        parts: Vec<PathBuf>,
        left: Left,
    ) -> Result<Promise, Failed> {
        let dir = self.ground.settings.sandboxes_dir();
        let bytes = bytes_to_copy_all(parts, dir).await;
        self.promise(bytes, left)
    }

    /// Room for so many bytes, until the promise is dropped.
    pub(super) fn promise(&self, bytes: u64, left: Left) -> Result<Promise, Failed> {
        let promised = self.ground.room.promise(bytes, FREE_BYTES_MIN);
        promised.map_err(|error| no_room(&error, left))
    }
}

pub(super) fn no_room(error: &NoRoom, left: Left) -> Failed {
    let code = match error {
        NoRoom::Short { .. } => FailureCode::DiskFull,
        NoRoom::Unknown(_) => FailureCode::NoCapacity,
    };
    failed(code, left, error)
}
