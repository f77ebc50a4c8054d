// jemalloc is linked into bulkhead-worker and takes the place of glibc's malloc, for LibTorch too.
//
// glibc maps a large tensor for each request and unmaps it behind it, so each of its pages faults in the kernel: 64 MiB
// cost several times as much as copying them. jemalloc keeps freed pages for the next request, for a while.

extern "C" {

/// Read before main(). `environment: {MALLOC_CONF: ...}` in the fleet file is read after it, key by key.
const char* malloc_conf =
    // 10 s, jemalloc's default: long enough for the pauses of a conversation. Then all of it is given back.
    "dirty_decay_ms:10000,"
    // No second stage: pages under MADV_FREE count as resident until another process wants them.
    "muzzy_decay_ms:0,"
    // By default, allocations of 8 MiB and more are given back as soon as they are freed.
    "oversize_threshold:0,"
    // Decay otherwise happens in calls of malloc and free, of which an idle worker makes none. The thread sleeps without
    // a timeout where nothing is due.
    "background_thread:true,max_background_threads:1";

}  // extern "C"
