#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <memory>

#include "tests/fakes/fake_cuda/fake.h"

namespace {

/// In a memfd, so that every process that opens the event sees it move. Who waits for one recording
/// is not let go by the next, whoever makes that. Only every 256th shares a word: more than a test
/// leaves unreached.
struct Counters {
    std::atomic<std::uint32_t> recorded;
    std::array<std::atomic<std::uint32_t>, 256> reached;  ///< futex words; of recording N
                                                          ///< modulo their number

    void reach(std::uint32_t recording) {
        std::atomic<std::uint32_t>& word = reached[recording % reached.size()];
        for (std::uint32_t before = word; before < recording && !word.compare_exchange_weak(before, recording);) {
        }
        ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
    [[nodiscard]] bool has_reached(std::uint32_t recording) const {
        return reached[recording % reached.size()] >= recording;
    }
    void wait_for(std::uint32_t recording) {
        std::atomic<std::uint32_t>& word = reached[recording % reached.size()];
        for (std::uint32_t now = word; now < recording; now = word)
            ::syscall(SYS_futex, &word, FUTEX_WAIT, now, nullptr, nullptr, 0);
    }
};

/// -1: none
int make_memfd() {
    const int fd = ::memfd_create("fake-cuda-event", MFD_CLOEXEC);
    if (fd >= 0 && ::ftruncate(fd, sizeof(Counters)) == 0) return fd;
    if (fd >= 0) ::close(fd);
    return -1;
}

std::shared_ptr<Counters> map_counters(int fd) {
    void* const page = ::mmap(nullptr, sizeof(Counters), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) return nullptr;
    return {static_cast<Counters*>(page), [](Counters* counters) { ::munmap(counters, sizeof(Counters)); }};
}

}  // namespace

struct bulkhead::cuda::CUevent_st {
    int fd = -1;
    int device = 0;
    bool interprocess = false;
    bool imported = false;
    std::shared_ptr<Counters> counters;  ///< shared with what is queued
    ~CUevent_st() { ::close(fd); }
    [[nodiscard]] std::uint64_t inode() const {
        struct stat status {};
        ::fstat(fd, &status);
        return status.st_ino;
    }
};

using namespace fake_cuda;

FAKE_CUDA_EXPORT CUresult cuEventCreate(CUevent* event, unsigned flags) {
    FAKE_CUDA_NEED_CONTEXT();
    const bool interprocess = (flags & CU_EVENT_INTERPROCESS) != 0;
    if (interprocess && (flags & CU_EVENT_DISABLE_TIMING) == 0) return CUDA_ERROR_INVALID_VALUE;
    auto made = std::make_unique<CUevent_st>();
    made->fd = make_memfd();
    if (made->fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    made->device = current()->device;
    made->interprocess = interprocess;
    made->counters = map_counters(made->fd);
    if (!made->counters) return CUDA_ERROR_OPERATING_SYSTEM;
    *event = made.release();
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuEventDestroy_v2(CUevent event) {
    FAKE_CUDA_ENTER();
    delete event;
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    FAKE_CUDA_NEED_CONTEXT();
    note("cuEventRecord", stream, event->inode());
    const std::uint32_t recording = ++event->counters->recorded;
    return enqueue(stream, [counters = event->counters, recording] { counters->reach(recording); });
}

FAKE_CUDA_EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    FAKE_CUDA_NEED_CONTEXT();
    note("cuStreamWaitEvent", stream, event->inode());
    const std::uint32_t latest = event->counters->recorded;
    if (const auto lock = lock_if_waits_block()) {
        if (!event->counters->has_reached(latest)) std::fputs("fake driver: a wait blocks\n", stderr);
        event->counters->wait_for(latest);
    }
    return enqueue(stream, [counters = event->counters, latest] { counters->wait_for(latest); });
}

FAKE_CUDA_EXPORT CUresult cuIpcGetEventHandle(CUipcEventHandle* handle, CUevent event) {
    FAKE_CUDA_NEED_CONTEXT();
    if (!event->interprocess || event->imported) return CUDA_ERROR_INVALID_HANDLE;
    *handle = std::bit_cast<CUipcEventHandle>(name_memfd("fakeevnt", event->fd, sizeof(Counters), event->device));
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuIpcOpenEventHandle(CUevent* event, CUipcEventHandle handle) {
    FAKE_CUDA_NEED_CONTEXT();
    auto opened = std::make_unique<CUevent_st>();
    const auto name = std::bit_cast<IpcName>(handle);
    if (const CUresult found = open_memfd("fakeevnt", name, opened->fd); found != CUDA_SUCCESS) {
        // That of a dead process opens, as on an H200, and was never recorded.
        if (found != CUDA_ERROR_INVALID_VALUE || ::kill(name.pid, 0) == 0 || errno != ESRCH) return found;
        opened->fd = make_memfd();
        if (opened->fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    }
    opened->device = current()->device;
    opened->imported = true;
    opened->counters = map_counters(opened->fd);
    if (!opened->counters) return CUDA_ERROR_OPERATING_SYSTEM;
    *event = opened.release();
    return CUDA_SUCCESS;
}
