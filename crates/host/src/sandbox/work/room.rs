//! What has to be there before a machine is begun: room in memory and on the disk, its drives, a turn.

use std::convert::Infallible;
use std::time::Instant;

use lifecycle::{FailureCode, Left};

use super::{Failed, Worker, chain, failed};
use crate::drive_trouble;
use crate::ground::free_bytes;
use crate::manifest::Manifest;
use crate::sandbox::body::drive_image;
use crate::turns::Turn;

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
        if self.body.seat.is_none() {
            self.body.seat = self.ground.budget.seat_if_free(memory_mib);
        }
        if self.body.seat.is_none() {
            // Others may have its turn meanwhile.
            drop(place.take());
            self.take_seat(memory_mib, Left::Asleep).await?;
        }
        let place = place.unwrap_or_else(|| self.ground.restores.stand_in_line(Instant::now()));
        let turn = self.unless_superseded(async { Ok::<_, Infallible>(place.turn().await) }).await;
        turn.map_err(|error| failed(FailureCode::WakeFailed, Left::Asleep, &error))
    }

    /// Waits for room in memory, in order of arrival.
    pub(super) async fn take_seat(&mut self, memory_mib: u32, left: Left) -> Result<(), Failed> {
        if self.body.seat.is_some() {
            return Ok(());
        }
        let seat =
            self.ground.budget.seat(Some(&self.id), memory_mib, self.ground.settings.memory_wait);
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

    /// Refuses when the disk has less than this left: a guest that finds no room for a page of its memory dies of it.
    pub(super) fn check_room(&self, bytes: u64, left: Left) -> Result<(), Failed> {
        let dir = self.ground.settings.sandboxes_dir();
        let free =
            free_bytes(&dir).map_err(|error| failed(FailureCode::NoCapacity, left, &error))?;
        if free < bytes {
            let error = format!("{} MiB are free on the disk, {} needed", free >> 20, bytes >> 20);
            return Err(Failed { code: FailureCode::DiskFull, left, error });
        }
        Ok(())
    }
}
