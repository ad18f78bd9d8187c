use std::fs;
use std::path::Path;

use fjall::PersistMode;
use tempfile::TempDir;

use super::format::{BlockKind, BlockWriter};
use super::*;
use crate::origin::disk::tables::{self, Table, UNSEALED_BYTES_MAX};
use crate::origin::history::STORE_FORMAT;

const TAKEN_MS: u64 = 1_700_000_000_000;
const RESTORED_MS: u64 = TAKEN_MS + 5_000;

fn origin() -> BackupOrigin {
    BackupOrigin { node_id: "node-1".to_owned(), taken_ms: TAKEN_MS }
}

/// Makes a database with these rows in its table `members`.
fn store_with(folder: &Path, rows: &[(&[u8], &[u8])]) -> DiskSnapshot {
    let database = tables::database(folder).open().unwrap();
    let table = Table::open(&database, "members", UNSEALED_BYTES_MAX).unwrap();
    for &(key, value) in rows {
        table.keyspace().insert(key, value).unwrap();
    }
    database.persist(PersistMode::SyncAll).unwrap();
    DiskSnapshot::take(&database, STORE_FORMAT, || vec![("members".into(), table.keyspace().clone())])
}

/// The rows of `members`, in the order of their keys.
fn rows_of(data_dir: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let database = tables::database(&data_dir.join("store")).open().unwrap();
    let table = Table::open(&database, "members", UNSEALED_BYTES_MAX).unwrap();
    let rows = table.keyspace().iter().map(|row| row.into_inner().unwrap());
    rows.map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
}

fn backup_of(rows: &[(&[u8], &[u8])]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("node-id"), "node-1").unwrap();
    let store = store_with(&folder.path().join("store"), rows);
    let source = BackupSource::take::<()>(origin(), folder.path(), || Ok(Some(store)), || Ok(None)).unwrap();
    let mut backup = Vec::new();
    source.write(&mut backup).unwrap();
    backup
}

fn small() -> Vec<u8> {
    backup_of(&[(b"a", b"1"), (b"b", b""), (b"c", &[0; 300])])
}

fn restored_into(backup: &[u8], data_dir: &Path) -> Result<BackupSummary, BackupError> {
    restore(backup, data_dir, || RESTORED_MS, |_, _| {})
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn restored_folder_has_the_rows_and_files_of_the_backup() {
    let rows: Vec<(Vec<u8>, Vec<u8>)> =
        (0..40_000_u32).map(|number| (number.to_be_bytes().to_vec(), vec![number as u8; 60])).collect();
    let borrowed: Vec<(&[u8], &[u8])> = rows.iter().map(|(key, value)| (&**key, &**value)).collect();
    let backup = backup_of(&borrowed);
    let folder = folder();
    let data_dir = folder.path().join("data");
    let summary = restored_into(&backup, &data_dir).unwrap();
    assert_eq!(summary.totals, BackupTotals { tables: 1, rows: 40_000, row_bytes: 40_000 * 64 });
    assert_eq!(summary.bytes, backup.len() as u64);
    assert_eq!(summary.header.node_id, "node-1");
    assert_eq!(rows_of(&data_dir), rows);
    assert_eq!(fs::read_to_string(data_dir.join("node-id")).unwrap(), "node-1");
    let expected = RestoreRecord { taken_ms: TAKEN_MS, restored_ms: RESTORED_MS };
    assert_eq!(restore_record(&data_dir).unwrap(), Some(expected));
    assert_eq!(names_in(&data_dir), ["node-id", "restored.json", "store"]);
    assert!(backup.len() < 40_000 * 20, "it is packed: {} bytes", backup.len());
}

#[test]
fn snapshot_is_of_its_moment() {
    let folder = folder();
    let database = tables::database(folder.path()).open().unwrap();
    let table = Table::open(&database, "members", UNSEALED_BYTES_MAX).unwrap();
    table.keyspace().insert("before", "1").unwrap();
    let snapshot =
        DiskSnapshot::take(&database, STORE_FORMAT, || vec![("members".into(), table.keyspace().clone())]);
    table.keyspace().insert("after", "2").unwrap();
    table.keyspace().remove("before").unwrap();
    let keys: Vec<_> =
        snapshot.tables().flat_map(|(_, rows)| rows.map(|row| row.unwrap().0.to_vec())).collect();
    assert_eq!(keys, [b"before"]);
}

#[test]
fn backup_that_is_cut_short_is_refused_wherever_that_is() {
    let whole = small();
    check(&*whole, |_, _| {}).unwrap();
    for length in 0..whole.len() {
        let error = check(&whole[..length], |_, _| {}).unwrap_err();
        assert!(matches!(error, BackupError::Cut(_) | BackupError::Foreign), "{length}: {error}");
    }
}

#[test]
fn backup_with_a_changed_bit_is_refused_wherever_that_is() {
    let whole = small();
    for byte in 0..whole.len() {
        for bit in [0x01, 0x80] {
            let mut damaged = whole.clone();
            damaged[byte] ^= bit;
            check(&*damaged, |_, _| {}).unwrap_err();
        }
    }
    let with_more = [&*whole, b"x"].concat();
    assert!(check(&*with_more, |_, _| {}).unwrap_err().to_string().contains("something follows"));
}

#[test]
fn blocks_that_change_places_are_refused() {
    let mut backup = Vec::new();
    let mut blocks = BlockWriter::begin(&mut backup).unwrap();
    blocks.put(BlockKind::File, b"a\nsame length").unwrap();
    blocks.put(BlockKind::File, b"b\nsame length").unwrap();
    let block = (backup.len() - 20) / 2;
    let (first, rest) = backup[20..].split_at(block);
    let exchanged = [&backup[..20], rest, first].concat();
    let mut reader = super::format::BlockReader::begin(&*exchanged).unwrap();
    let error = reader.next().unwrap_err();
    assert!(error.to_string().contains("checksum"), "{error}");
}

#[test]
fn refused_backup_leaves_nothing_in_the_folder() {
    let whole = small();
    let mut damaged = whole.clone();
    let late = whole.len() - 30;
    damaged[late] ^= 1;
    for refused in [&whole[..late], &damaged, b"not a backup"] {
        let folder = folder();
        restored_into(refused, folder.path()).unwrap_err();
        assert!(names_in(folder.path()).is_empty(), "{:?}", names_in(folder.path()));
    }
}

#[test]
fn folder_with_something_in_it_is_refused() {
    let folder = folder();
    fs::write(folder.path().join("clock.json"), "{}").unwrap();
    let error = restored_into(&small(), folder.path()).unwrap_err();
    assert!(error.to_string().contains("it has clock.json"), "{error}");
    assert_eq!(names_in(folder.path()), ["clock.json"]);
}

#[test]
fn restore_after_one_that_was_killed_begins_again() {
    let folder = folder();
    fs::create_dir_all(folder.path().join("lost+found")).unwrap();
    fs::create_dir_all(folder.path().join("restoring/store")).unwrap();
    fs::write(folder.path().join("restoring/store/junk"), "half").unwrap();
    // State after a crash between two moves.
    fs::create_dir_all(folder.path().join("outbox")).unwrap();
    assert!(is_unfinished(folder.path()));
    restored_into(&small(), folder.path()).unwrap();
    assert!(!is_unfinished(folder.path()));
    assert_eq!(names_in(folder.path()), ["lost+found", "node-id", "restored.json", "store"]);
    assert_eq!(rows_of(folder.path()).len(), 3);
}

#[test]
fn later_format_is_refused_with_the_version_that_wrote_it() {
    let line = b"fanfare backup 0002\n";
    let error = check(&line[..], |_, _| {}).unwrap_err();
    assert!(matches!(error, BackupError::Version { ref found } if found == "0002"), "{error}");
    let header = BackupHeader {
        node_version: "7.1.0".to_owned(),
        node_id: "node-1".to_owned(),
        taken_ms: TAKEN_MS,
        store_format: Some("fanfare 2".to_owned()),
        outbox_format: None,
        rows_about: 0,
    };
    let mut backup = Vec::new();
    let mut blocks = BlockWriter::begin(&mut backup).unwrap();
    blocks.put(BlockKind::Header, &serde_json::to_vec(&header).unwrap()).unwrap();
    let message = check(&*backup, |_, _| {}).unwrap_err().to_string();
    assert!(message.contains("fanfare 2") && message.contains("7.1.0"), "{message}");
}

/// A backup of store and outbox with these tables, and rows as they stand in a block.
fn backup_with(tables: &[(&str, &[u8])]) -> Vec<u8> {
    let header = BackupHeader {
        node_version: "0.1.0".to_owned(),
        node_id: "node-1".to_owned(),
        taken_ms: TAKEN_MS,
        store_format: Some(STORE_FORMAT.to_owned()),
        outbox_format: Some(crate::origin::outbox::FORMAT.to_owned()),
        rows_about: 0,
    };
    let mut backup = Vec::new();
    let mut blocks = BlockWriter::begin(&mut backup).unwrap();
    blocks.put(BlockKind::Header, &serde_json::to_vec(&header).unwrap()).unwrap();
    for (table, rows) in tables {
        blocks.put(BlockKind::Table, table.as_bytes()).unwrap();
        blocks.put(BlockKind::Rows, rows).unwrap();
    }
    backup
}

#[test]
fn row_without_a_key_is_refused() {
    let good = backup_with(&[("store/members", b"\0\x01\0\0\0\x01kv")]);
    assert!(
        matches!(check(&*good, |_, _| {}), Err(BackupError::Cut(_))),
        "it has no end, and is good so far"
    );
    for rows in [&b"\0\0\0\0\0\x01v"[..], b"\0\x01\0\0\0\x02kv", b"\0"] {
        let message = check(&*backup_with(&[("store/members", rows)]), |_, _| {}).unwrap_err().to_string();
        assert!(message.contains("no end, or no key"), "{message}");
    }
}

#[test]
fn database_that_comes_twice_is_refused() {
    let rows = b"\0\x01\0\0\0\x01kv";
    let tables: [(&str, &[u8]); 3] =
        [("store/members", rows), ("outbox/events", rows), ("store/members", rows)];
    let message = check(&*backup_with(&tables), |_, _| {}).unwrap_err().to_string();
    assert!(message.contains("its database has ended before"), "{message}");
}

#[test]
fn restored_databases_are_for_their_owner_alone() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    let folder = folder();
    restored_into(&small(), folder.path()).unwrap();
    let store = fs::metadata(folder.path().join("store")).unwrap();
    assert_eq!(store.permissions().mode() & 0o777, 0o700);
    assert_eq!(store.uid(), fs::metadata(folder.path()).unwrap().uid());
}

#[test]
fn restore_by_root_belongs_to_the_owner_of_the_folder() {
    use std::os::unix::fs::{MetadataExt as _, lchown};
    let folder = folder();
    if lchown(folder.path(), Some(4321), Some(4322)).is_err() {
        // Only root can change the owner of files.
        return;
    }
    restored_into(&small(), folder.path()).unwrap();
    for name in ["store", "node-id", "restored.json"] {
        let found = fs::metadata(folder.path().join(name)).unwrap();
        assert_eq!((found.uid(), found.gid()), (4321, 4322), "{name}");
    }
    let within = fs::read_dir(folder.path().join("store")).unwrap().next().unwrap().unwrap();
    assert_eq!(within.metadata().unwrap().uid(), 4321);
}

#[test]
fn writer_that_gives_up_says_why() {
    let header = BackupHeader {
        node_version: "0.1.0".to_owned(),
        node_id: String::new(),
        taken_ms: TAKEN_MS,
        store_format: None,
        outbox_format: None,
        rows_about: 0,
    };
    let mut backup = Vec::new();
    let mut blocks = BlockWriter::begin(&mut backup).unwrap();
    blocks.put(BlockKind::Header, &serde_json::to_vec(&header).unwrap()).unwrap();
    blocks.put(BlockKind::GaveUp, b"the disk is gone").unwrap();
    let message = check(&*backup, |_, _| {}).unwrap_err().to_string();
    assert!(message.contains("gave up") && message.contains("the disk is gone"), "{message}");
}
