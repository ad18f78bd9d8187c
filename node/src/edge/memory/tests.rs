use super::*;

const MIB: u64 = 1024 * 1024;

#[test]
fn a_full_node_has_room_again_well_below_the_ceiling() {
    let memory = MemoryMonitor::default();
    let looks =
        [(89, false), (90, true), (89, true), (85, true), (84, false), (89, false), (95, true), (1, false)];
    for (used, is_full) in looks {
        memory.look(100 * MIB, used * MIB);
        assert_eq!(memory.is_full(), is_full, "{used} %");
    }
}

#[test]
fn the_lowest_ceiling_of_all_cgroups_counts() {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let file = root.path().join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    };
    let of = |own: &str| MemoryCeiling::of_cgroup(own, root.path()).map(|ceiling| ceiling.max_bytes);
    write("pod/node/memory.max", "max\n");
    write("pod/memory.max", "2048\n");
    write("memory.max", "4096\n");
    write("memory/docker/x/memory.limit_in_bytes", "9223372036854771712\n");
    write("memory/memory.limit_in_bytes", "1024\n");
    assert_eq!(of("0::/pod/node\n"), Some(2048));
    assert_eq!(of("0::/\n"), Some(4096));
    assert_eq!(of("0::/gone/elsewhere\n"), Some(4096), "the path is that of the machine");
    assert_eq!(of("5:cpu,memory:/docker/x\n"), Some(1024));
    assert_eq!(of("0::/pod\n5:cpu,memory:/docker/x\n"), Some(1024));
    assert_eq!((of(""), of("5:cpu:/\nx")), (None, None));
    let ceiling = MemoryCeiling::of_cgroup("0::/pod/node\n", root.path()).unwrap();
    let folder = root.path().join("pod");
    assert_eq!(ceiling.counted, MemorySource::Cgroup { folder, names: &SECOND });
}

#[test]
fn without_a_number_there_is_no_ceiling() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("memory.max"), "max\n").unwrap();
    assert_eq!(MemoryCeiling::of_cgroup("0::/\n", root.path()), None);
}

#[test]
fn all_memory_of_a_cgroup_but_its_page_cache_counts() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("memory.current", "1000\n");
    write("memory.usage_in_bytes", "2000\n");
    write("memory.stat", "anon 5\nfile 600\nfile_mapped 7\nshmem 100\ntotal_cache 1600\ntotal_shmem 100\n");
    let of = |names| {
        let counted = MemorySource::Cgroup { folder: folder.path().to_owned(), names };
        MemoryCeiling { max_bytes: 1, counted }.used_bytes()
    };
    assert_eq!((of(&SECOND), of(&FIRST)), (500, 500));
    write("memory.stat", "anon 5\nfile 1600\n");
    assert_eq!(of(&SECOND), 0, "the two files are read one after the other");
}

#[test]
#[cfg(target_os = "linux")]
fn memory_of_the_process_counts_where_the_cgroup_says_nothing() {
    let of = |counted| MemoryCeiling { max_bytes: 1, counted }.used_bytes();
    let folder = tempfile::tempdir().unwrap().path().join("gone");
    for counted in [MemorySource::Process, MemorySource::Cgroup { folder, names: &SECOND }] {
        let used = of(counted);
        assert!(used > MIB / 4, "{used}");
    }
}
