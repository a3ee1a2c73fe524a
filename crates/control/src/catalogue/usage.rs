//! What deleted sandboxes had used.

use api::SandboxId;
use api::usage::{MONTH_SECONDS, Usage};
use sqlx::Row;

use super::{Catalogue, now_ms};
use crate::failure::Failure;

/// MiB of a GiB.
const GIB_MIB: f64 = 1024.0;
/// Megabytes of a gigabyte.
const GB_MB: f64 = 1000.0;

impl Catalogue {
    /// Keeps what one that is about to be deleted has used. Again: the newest counts.
    pub(crate) async fn keep_usage(
        &self,
        id: &SandboxId,
        name: &str,
        usage: &Usage,
    ) -> Result<(), Failure> {
        sqlx::query(
            "INSERT INTO usage_of_deleted (sandbox_id, name, deleted_ms, awake_ms, asleep_memory_ms, asleep_disk_ms, \
             off_ms, cpu_ms, memory_mib_seconds, state_mb_seconds) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) \
             ON CONFLICT (sandbox_id) DO UPDATE SET deleted_ms = $3, awake_ms = $4, asleep_memory_ms = $5, \
             asleep_disk_ms = $6, off_ms = $7, cpu_ms = $8, memory_mib_seconds = $9, state_mb_seconds = $10",
        )
        .bind(id.as_str())
        .bind(name)
        .bind(now_ms())
        .bind(whole(usage.awake_seconds * 1000.0))
        .bind(whole(usage.asleep_memory_seconds * 1000.0))
        .bind(whole(usage.asleep_disk_seconds * 1000.0))
        .bind(whole(usage.off_seconds * 1000.0))
        .bind(whole(usage.cpu_seconds * 1000.0))
        .bind(whole(usage.memory_gib_seconds * GIB_MIB))
        .bind(whole(usage.state_gb_months * MONTH_SECONDS * GB_MB))
        .execute(&self.writer)
        .await
        .map_err(Failure::internal("keep what a sandbox has used"))?;
        Ok(())
    }

    /// All of them together.
    pub(crate) async fn usage_of_deleted(&self) -> Result<Usage, Failure> {
        let row = sqlx::query(
            "SELECT CAST(COALESCE(SUM(awake_ms), 0) AS BIGINT) AS awake, \
             CAST(COALESCE(SUM(asleep_memory_ms), 0) AS BIGINT) AS memory, \
             CAST(COALESCE(SUM(asleep_disk_ms), 0) AS BIGINT) AS disk, \
             CAST(COALESCE(SUM(off_ms), 0) AS BIGINT) AS off, \
             CAST(COALESCE(SUM(cpu_ms), 0) AS BIGINT) AS cpu, \
             CAST(COALESCE(SUM(memory_mib_seconds), 0) AS BIGINT) AS mib, \
             CAST(COALESCE(SUM(state_mb_seconds), 0) AS BIGINT) AS state FROM usage_of_deleted",
        )
        .fetch_one(&self.reader)
        .await
        .map_err(Failure::internal("read what deleted sandboxes had used"))?;
        let sum = |column: &str| {
            let sum: i64 = row.try_get(column).map_err(Failure::internal("read a sum of usage"))?;
            Ok::<f64, Failure>(as_f64(sum))
        };
        Ok(Usage {
            awake_seconds: sum("awake")? / 1000.0,
            asleep_memory_seconds: sum("memory")? / 1000.0,
            asleep_disk_seconds: sum("disk")? / 1000.0,
            off_seconds: sum("off")? / 1000.0,
            cpu_seconds: sum("cpu")? / 1000.0,
            memory_gib_seconds: sum("mib")? / GIB_MIB,
            state_bytes: 0,
            state_gb_months: sum("state")? / GB_MB / MONTH_SECONDS,
        })
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a sum of milliseconds fits for longer than anybody is billed"
)]
fn whole(number: f64) -> i64 {
    number.round() as i64
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a sum of milliseconds is exact for longer than anybody is billed"
)]
fn as_f64(number: i64) -> f64 {
    number as f64
}
