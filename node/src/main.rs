use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    #[cfg(target_os = "linux")]
    use_small_pages();
    fanfare::cli::run()
}

/// Disables huge pages, which the allocator asks for and of which a heap of small objects leaves half empty.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "there is no safe call for the size of pages")]
fn use_small_pages() {
    let (set, unused): (libc::c_ulong, libc::c_ulong) = (1, 0);
    // Where it is refused a node takes more memory, and is the same otherwise.
    // SAFETY: the call takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, set, unused, unused, unused) };
}
