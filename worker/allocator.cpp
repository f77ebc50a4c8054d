// jemalloc is linked into bulkhead-worker and replaces glibc's malloc, for LibTorch too.
//
// glibc maps a large tensor for each request and unmaps it afterwards, so each page faults in the
// kernel; 64 MiB cost several times as much as copying them. jemalloc keeps freed pages for the
// next request, for a while.

extern "C" {

/// Read before main(), then merged, key by key, with `environment: {MALLOC_CONF: ...}` of
/// the fleet file.
const char* malloc_conf =
    // 10 s, jemalloc's default: long enough for pauses in a conversation. Then all freed
    // pages are returned.
    "dirty_decay_ms:10000,"
    // No second stage: pages under MADV_FREE count as resident until another process needs them.
    "muzzy_decay_ms:0,"
    // The default returns allocations of 8 MiB and more as soon as they are freed.
    "oversize_threshold:0,"
    // For one CPU jemalloc makes one arena, and with one it returned 64 MiB at each request. For
    // two CPUs it makes eight. Few threads of a worker allocate.
    "narenas:8,"
    // Without a thread, decay happens in malloc and free, which an idle worker does not call. The
    // thread sleeps without a timeout if nothing is due.
    "background_thread:true,max_background_threads:1";

}  // extern "C"
